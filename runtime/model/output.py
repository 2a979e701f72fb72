"""What generation gives: tokens, text, figures, and the stream of a single prompt."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

from accel.runtime.backends.onnx.tune import Tuning
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.row import STAGES, Row
from accel.runtime.inputs.text import StopMatcher, Tokenizer
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Output:
    """tokens: the new ones of each prompt; text: theirs, None without a tokenizer; stats: see
    `Meter.stats`.
    """

    tokens: list[list[int]]
    text: list[str] | None
    stats: dict[str, Any]


class Transcript:
    """The text of one row as its tokens come, cut at the first stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream() if tokenizer else None
        self._matcher = StopMatcher(stops) if stops else None
        self._pieces: list[str] = []
        self._taken = 0
        self._finished = False

    def __call__(self, token: int) -> bool:
        """Take one token; whether the text has reached a stop string."""
        assert self._stream is not None
        piece, stopped = self._stream.push(token), False
        if self._matcher is not None:
            piece, stopped = self._matcher.push(piece)
        self._pieces.append(piece)
        return stopped

    def branch(self) -> Transcript | None:
        """See `loop.Watch`. Its text is of the tokens from here on."""
        if self._matcher is None or self._stream is None:
            return None
        other = copy(self)
        other._stream, other._matcher, other._pieces = (
            self._stream.branch(),
            copy(self._matcher),
            [],
        )
        return other

    def take(self) -> str:
        """The text that became certain since the last call."""
        fresh = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return fresh

    def finish(self) -> str:
        """The rest, now that no more tokens come; what `take` has not given yet."""
        if not self._finished and self._stream is not None:
            self._finished = True
            piece = self._stream.finish()
            if self._matcher is not None:
                passed, stopped = self._matcher.push(piece)
                piece = passed if stopped else passed + self._matcher.finish()[0]
            self._pieces.append(piece)
        return self.take()

    def text(self, tokens: list[int]) -> str:
        """All of it; `tokens` are those that were pushed."""
        if self._matcher is None and self._tokenizer is not None:
            return self._tokenizer.decode(tokens)
        self.finish()
        return "".join(self._pieces)


class Meter:
    """Counts and times the calls of one `generate` or `stream`."""

    def __init__(self, tuning: Tuning | None = None, costs: Costs | None = None) -> None:
        self.tuning = tuning
        self.costs = costs
        self.calls = 0
        self.reused = 0
        self.kv_bytes = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._decoded = 0  # tokens that came after a group's first

    def watch(
        self, tokens: Iterator[tuple[int, int]], session: Session, rows: list[Row]
    ) -> Iterator[tuple[int, int]]:
        """Pass a loop's tokens on; time until the prompts of its rows have run is prefill, the rest decode, the
        consumer's own is neither.
        """
        first, before, reused = True, self.calls, self.reused
        while True:
            start = time.perf_counter()
            pair = next(tokens, None)
            end = time.perf_counter()
            begun = (max(row.began for row in rows) or end) if first else start
            stats = session.stats
            self.calls = before + int(stats["calls"])
            self.reused = reused + int(stats["reused"])
            self.kv_bytes = max(self.kv_bytes, session.kv_most)
            self.prefill_seconds += begun - start
            self.decode_seconds += end - begun
            self._decoded += pair is not None and not first
            if pair is None:
                return
            first = False
            yield pair

    def stats(self, rows: list[Row]) -> dict[str, Any]:
        """calls: of the graph; tokens: new ones; reused: tokens of prompts that had been run before;
        tokens_per_call: of the two; tokens_per_second: while decoding, without each group's first
        token; kv_bytes: largest state of a group; peak_memory: of the process, bytes; kernels: the
        variant of the step; costs: c(T)/c(1) of a call of T tokens, None where `CompiledModel.costs`
        was never asked for on this machine; speculation: tokens drafted, those of them accepted, rounds of a
        row with a draft, steps of a row without one because drafts did not pay (fallback), for each place of a
        draft how many tokens were tested there and how many of them stood (by_place), and the seconds that went
        into drafts, into calls and into the rest (draft, verify, host), None where the loop drafts none; finish:
        why each row ended.
        """
        tokens = sum(len(row.tokens) for row in rows)
        return {
            "calls": self.calls,
            "tokens": tokens,
            "reused": self.reused,
            "prompt_tokens": sum(int(row.prompt.size) for row in rows),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_call": tokens / self.calls if self.calls else 0.0,
            "tokens_per_second": self._decoded / self.decode_seconds if self._decoded else 0.0,
            "kv_bytes": self.kv_bytes,
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


class Stream:
    """Iterates over the pieces of one prompt's continuation; `stats` at any time, `close()` to end
    early.
    """

    def __init__(self, pieces: Iterator[Any], meter: Meter, row: Row):
        self._pieces = pieces
        self._meter = meter
        self._row = row

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._pieces)

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far; of a loop that drafts, all that stand, a few more than were given."""
        return list(self._row.tokens)

    @property
    def stats(self) -> dict[str, Any]:
        """The figures so far, as in `Output.stats`."""
        return self._meter.stats([self._row])

    def close(self) -> None:
        """End it and free the session."""
        if isinstance(self._pieces, Generator):
            self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pieces(tokens: Iterator[int], script: Transcript | None) -> Iterator[Any]:
    """Token ids as they come, or the text that they make certain."""
    for token in tokens:
        if script is None:
            yield token
        elif piece := script.take():
            yield piece
    if script is not None and (piece := script.finish()):
        yield piece


def peak_memory() -> int:
    """Most memory that this process has held, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
