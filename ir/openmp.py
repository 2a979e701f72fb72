"""How torch's threads wait for each other, on a machine that other programs use too.

A product is shared among OpenMP's threads, and each waits busily for the others. While another program has one of
the cores, that wait is as long as a time slice of the system: at every product of a model.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache

POLICY = "OMP_WAIT_POLICY"
_late = False


def rest() -> None:
    """Let threads of OpenMP rest while they wait, in this process and those that it starts, unless the user chose.

    OpenMP reads this once, when torch is imported: see `rest_late`.
    """
    global _late
    _late = "torch" in sys.modules and POLICY not in os.environ
    os.environ.setdefault(POLICY, "PASSIVE")


@cache
def rest_late() -> None:
    """The same where torch was imported before accel: GNU's OpenMP hardly spins once a process has more of its threads
    than cores, so teams of them wait here for as long as the process runs.
    """
    if not _late:
        return
    import torch

    cores = os.cpu_count() or 1
    others = torch.get_num_threads() - 1  # of a team, beside the thread that calls
    for _ in range((cores - 1) // others if others else 0):
        there = threading.Event()
        threading.Thread(target=_team, args=(there, cores), daemon=True).start()
        there.wait()


def _team(ready: threading.Event, cores: int) -> None:
    import torch

    torch.zeros(cores << 16).add_(1)  # enough numbers for all threads to take some
    ready.set()
    threading.Event().wait()
