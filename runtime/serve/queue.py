"""The requests of an engine that wait, and what is counted of all: used by any thread, while `changed` is held."""

from __future__ import annotations

from collections import Counter, deque
from threading import Condition

from accel.runtime.decode.row import Row
from accel.runtime.serve.job import Job

COUNTS = (
    "requests_total", "prompt_tokens_total", "generated_tokens_total", "preemptions_total",
    "reused_tokens_total", "drafts_total", "drafted_total", "accepted_total", "kv_bytes",
)  # fmt: skip


class Queue:
    """changed: notified when requests come or go. halted: all are to be cancelled."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.jobs = deque[Job]()
        self.counts = Counter[str](dict.fromkeys(COUNTS, 0))
        self.halted = False

    def count_drafts(self, row: Row) -> None:
        """Of a request that ended; `changed` is held."""
        self.counts["drafts_total"] += row.drafting["rounds"]
        for name in ("drafted", "accepted"):
            self.counts[f"{name}_total"] += row.drafting[name]
        for (levels, stood), count in row.drafts.items():
            for position in range(1, levels + 1):
                self.counts[f"draft_drafted_total/{position}"] += count
                self.counts[f"draft_accepted_total/{position}"] += count * (position <= stood)

    def count(self, name: str, more: int) -> None:
        """Add to a count; `changed` is not held."""
        with self.changed:
            self.counts[name] += more
