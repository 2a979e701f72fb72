"""What generation counts and times."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel.runtime.backends.tuning import Tuning
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.row import STAGES, Row
from accel.runtime.session.session import Session


class Meter:
    """Counts and times the calls of one `generate` or `stream`."""

    def __init__(self, tuning: Tuning | None = None, costs: Costs | None = None) -> None:
        self.tuning = tuning
        self.costs = costs
        self.calls = 0
        self.reused = 0
        self.exchanged = 0
        self.kv_bytes = 0
        self.snapshots: dict[str, float] | None = None
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._decoded = 0  # tokens that came after a group's first

    def watch(
        self, tokens: Iterator[tuple[int, int]], session: Session, rows: list[Row]
    ) -> Iterator[tuple[int, int]]:
        """Pass on a loop's tokens and measure time. Prefill lasts until the prompts of the rows have run;
        the rest is decode. The consumer's own time is excluded.
        """
        first, before, reused = True, self.calls, self.reused
        exchanged = self.exchanged - int(session.stats.get("exchanged_bytes", 0))
        copied = self.snapshots or dict.fromkeys(("taken", "seconds", "bytes"), 0.0)
        begun_with = session.stats
        if held := int(session.lengths.sum()):  # of an earlier turn
            earlier = session.stats
            before, reused = before - int(earlier["calls"]), reused + held - int(earlier["reused"])
        while True:
            start = time.perf_counter()
            pair = next(tokens, None)
            end = time.perf_counter()
            begun = (max(row.began for row in rows) or end) if first else start
            stats = session.stats
            self.calls = before + int(stats["calls"])
            self.reused = reused + int(stats["reused"])
            self.exchanged = exchanged + int(stats.get("exchanged_bytes", 0))
            if "snapshots" in stats:
                taken, spent = (stats[n] - begun_with[n] for n in ("snapshots", "snapshot_seconds"))
                self.snapshots = {
                    "taken": copied["taken"] + taken,
                    "seconds": copied["seconds"] + spent,
                    "bytes": max(copied["bytes"], stats["snapshot_bytes"]),
                }
            self.kv_bytes = max(self.kv_bytes, session.kv_most + rows[0].draft_kv_bytes)
            self.prefill_seconds += begun - start
            self.decode_seconds += end - begun
            self._decoded += pair is not None and not first
            if pair is None:
                return
            first = False
            yield pair

    def stats(self, rows: list[Row]) -> dict[str, Any]:
        """The statistics so far: the keys of `Output.stats`."""
        tokens = sum(len(row.tokens) for row in rows)
        return {
            "calls": self.calls,
            "tokens": tokens,
            "reused": self.reused,
            "exchanged_bytes": self.exchanged,
            "prompt_tokens": sum({id(row.prompt): int(row.prompt.size) for row in rows}.values()),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_call": tokens / self.calls if self.calls else 0.0,
            "tokens_per_second": self._decoded / self.decode_seconds if self._decoded else 0.0,
            "kv_bytes": self.kv_bytes,
            "snapshots": self.snapshots,
            "peak_memory": peak_memory(),
            "kernels": self.tuning.kernels if self.tuning else None,
            "costs": self.costs.ratios if self.costs else None,
            "speculation": speculation(rows),
            "finish": [row.finish for row in rows],
        }


def speculation(rows: list[Row]) -> dict[str, Any] | None:
    """As in `Meter.stats`."""
    figures, drafts, seconds = (
        Counter[str](),
        Counter[tuple[int, int]](),
        dict.fromkeys(STAGES, 0.0),
    )
    for row in rows:
        figures.update(row.drafting)
        drafts.update(row.drafts)
        for stage, spent in row.seconds.items():
            seconds[stage] += spent
    if not figures:
        return None
    places: list[list[int]] = []
    for (drafted, stood), count in drafts.items():
        tested = min(drafted, stood + 1)
        places += [[0, 0] for _ in range(tested - len(places))]
        for place in range(tested):
            places[place][0] += count
            places[place][1] += count * (place < stood)
    return {**figures, "by_place": places, "seconds": seconds}


def peak_memory() -> int:
    """Peak memory of this process in bytes; 0 if the system does not report it."""
    try:
        told = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(told.partition("VmHWM:")[2].split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
