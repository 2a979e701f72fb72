"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.schedule import Base, Limits, Plan, State
from accel.runtime.schedule._queue import served


@dataclass(frozen=True)
class Template(Base):
    """Which requests run next: here, in the order of arrival, and prompts whole."""

    def plan(self, state: State, limits: Limits) -> Plan:
        return served(state, limits, None)
