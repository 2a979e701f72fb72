"""The number of compute threads of a call, by default."""

from __future__ import annotations

import math
import os
from pathlib import Path

MOST_THREADS = 1024  # of a call: each is one of the system's, with memory of its own


def default_threads() -> int:
    """`OMP_NUM_THREADS` where it is set to a number up to MOST_THREADS, as other numerical libraries take it; else the
    physical cores.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    given = int(first) if first.isdecimal() and len(first) <= 4 else 0
    return given if 0 < given <= MOST_THREADS else physical_cores()


def physical_cores() -> int:
    """Physical cores that this process may use: its CPU set without hyper-thread twins, within the
    cgroup's quota.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        twins = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(_read(twins) or str(cpu))
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    limit = (
        math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else len(cores)
    )
    return max(1, min(len(cores), limit))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
