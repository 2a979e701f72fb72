"""KVShare's scheduler (arXiv:2503.16525): requests whose prompts are known for the most part run first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from accel.ir.axis import option
from accel.runtime.schedule import Base, Limits, Plan, State, Task
from accel.runtime.schedule._queue import served


@dataclass(frozen=True)
class HitRatio(Base):
    """Of requests that wait, those come first of whose prompts the largest share is known (`kv.reuse`); of equals the
    earlier. Each second that one has waited counts as a share of `aging`, so none is passed over for good.

    Prompts run whole. An iteration admits requests until their prompts have `work` tokens that are not known, and at
    least one: hits run many at a time, misses few, and those that decode wait about as long for either.
    """

    work: int = option(1024, least=1, most=1 << 20)
    aging: float = option(0.1, above=0)

    overtakes = True
    reads_hits = True

    def plan(self, state: State, limits: Limits) -> Plan:
        order = sorted(state.waiting, key=lambda task: (-self.score(task, state.now), task.id))
        return served(replace(state, waiting=self.first(order, limits)), limits, None)

    def score(self, task: Task, now: float) -> float:
        """What share of its prompt is known, and what it has waited."""
        return task.hits / max(1, task.length) + self.aging * (now - task.arrived)

    def first(self, order: Sequence[Task], limits: Limits) -> list[Task]:
        """Those of the order that an iteration may admit, and all that can never run."""
        used, found = 0, list[Task]()
        for task in order:
            if not limits.fits(task):
                found.append(task)
            elif not used or used + task.length - task.hits <= self.work:
                found.append(task)
                used += max(1, task.length - task.hits)
            else:
                used = self.work  # nobody behind it is admitted before it
        return found
