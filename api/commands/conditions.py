"""Under which conditions something was measured: the machine, the day, what else it did, and the command."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

BUSY = 0.5  # load average from which on others disturb


@dataclass(frozen=True)
class Conditions:
    """load_before, load_after: load averages of the minute before; none where the system tells none."""

    machine: str
    cores: int
    date: str
    command: str
    load_before: float | None = None
    load_after: float | None = None

    @classmethod
    def now(cls) -> Self:
        """Before a measurement."""
        from accel.lowering.onnx.threads import physical_cores
        from accel.runtime.backends.onnx.machine import cpu_name

        date = datetime.now().astimezone().isoformat(timespec="minutes")
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        return cls(cpu_name(), physical_cores(), date, command, _load())

    def ended(self) -> Self:
        """After it."""
        return replace(self, load_after=_load())

    @property
    def warning(self) -> str:
        """What is wrong with them; empty where nothing is."""
        if self.load_before is None or self.load_before <= BUSY:
            return ""
        return f"others used this machine (load average {self.load_before:.2f} before): trust the figures less"

    def text(self) -> list[tuple[str, str]]:
        """For people: names, and what they are."""
        loads = [load for load in (self.load_before, self.load_after) if load is not None]
        return [
            ("machine", f"{self.machine}, {self.cores} cores"),
            ("date", self.date),
            ("load average", ", then ".join(f"{load:.2f}" for load in loads)),
            ("command", self.command),
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        return None
