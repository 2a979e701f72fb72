"""How the threads of a call wait for each other: busily, which is soonest on free cores, or at rest."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from accel.ir.errors import InputError

CHOICE = "ACCEL_SPINNING"  # the environment variable by which a user chooses: 1 or 0
FREE = 0.85  # of their time that threads must get for busy waiting to cost nothing
SECONDS = 0.03  # of measuring: several time slices of the system
_BLOCK = bytes(1 << 16)  # hashing so much lets other threads of Python run


@dataclass(frozen=True)
class Waiting:
    """Whether threads wait busily, and why; `free`: the share of its time that each got, where that was measured."""

    spinning: bool
    why: str
    free: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """In a line."""
        return f"{'spin' if self.spinning else 'rest'} while they wait ({self.why})"


def waiting(threads: int) -> Waiting:
    """How so many threads of a call should wait: as the user says, else by whether the cores are free now.

    A thread that spins for one which has no core costs a time slice of the system at each operator.
    Raises InputError where the environment variable is neither 0 nor 1.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", "0", "1"):
        raise InputError(
            f"{CHOICE}={asked}: give 1 (threads spin while they wait), 0 (they rest), or unset it"
        )
    if asked:
        return Waiting(asked == "1", f"{CHOICE}={asked}")
    if threads == 1:
        return Waiting(False, "one thread waits for nobody")
    if threads > (os.cpu_count() or 1):
        return Waiting(False, f"{threads} threads on {os.cpu_count()} cores")
    free = _free(threads)
    return Waiting(
        free >= FREE, f"threads get {free:.0%} of the cores that they use", round(free, 3)
    )


@lru_cache
def _free(threads: int) -> float:
    """`share`, measured once in a process: threads of a model that was called shortly before spin on for a while, and
    the next model that is opened would take them for another program's.
    """
    return share(threads)


def share(threads: int) -> float:
    """The least share of elapsed time that one of so many busy threads gets a core for."""
    found: list[float] = []
    start = threading.Barrier(threads)

    def work() -> None:
        start.wait()
        begin, used = time.perf_counter(), time.thread_time()
        while time.perf_counter() < begin + SECONDS:
            hashlib.sha256(_BLOCK)
        found.append((time.thread_time() - used) / (time.perf_counter() - begin))

    team = [threading.Thread(target=work) for _ in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return min(found)
