"""The clock of whatever decides by time: which kernels run, how wide a call may be, whether drafts pay."""

from time import perf_counter


def now() -> float:
    """Seconds since some moment."""
    return perf_counter()


def host_now() -> float:
    """The same, for what the host does between calls: a clock of its own, so that tests set what that takes."""
    return perf_counter()
