"""Whether a Ray has the CPUs for what is asked of it. Without them Ray waits, for good."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from accel.ir.errors import InputError, shown


def machines() -> list[float]:
    """CPUs of each machine of the Ray that runs."""
    return [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]


def check_room(
    machines: Sequence[float], workers: int, cpus: float, kind: str, spare: int = 0
) -> None:
    """Raise InputError where machines of so many CPUs have no room for `workers`, of `cpus` each on one machine, beside
    `spare` CPUs for other work.
    """
    total, places = sum(machines), sum(int(one / cpus + 1e-9) for one in machines)
    if places >= workers and workers * cpus <= total - spare + 1e-9:
        return
    each = ", ".join(f"{one:g}" for one in machines)
    beside = f", beside {spare} for reading and writing" if spare else ""
    raise InputError(
        f"{workers} {kind} of {cpus:g} CPUs do not fit into this Ray, whose machines have {each or 'none'}{beside}; "
        f"ask for fewer or smaller {kind}, or start a Ray with more"
    )


def share(cpus: float) -> int:
    """Compute threads of one that has so many CPUs. Raises InputError."""
    if isinstance(cpus, bool) or not isinstance(cpus, (int, float)) or not 0 < cpus < 1e6:
        raise InputError(f"cpus = {shown(cpus)}: give a number above 0")
    return max(1, int(cpus))


def actor_environment(threads: int) -> dict[str, dict[str, str]]:
    """The `runtime_env` of one with so many threads, for libraries that read it when they are imported."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
