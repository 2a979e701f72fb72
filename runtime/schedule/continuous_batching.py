"""Continuous batching (Orca: A Distributed Serving System for Transformer-Based Generative Models, OSDI 2022):
requests join and leave at each iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.schedule import Base, Limits, Plan, State
from accel.runtime.schedule._queue import served


@dataclass(frozen=True)
class ContinuousBatching(Base):
    """Each prompt runs whole, in the iteration in which its request is admitted; the requests that decode wait for it
    meanwhile. One that finds no block loses those of the latest request, which runs again later.
    """

    def plan(self, state: State, limits: Limits) -> Plan:
        return served(state, limits, None)
