"""The result of generation: tokens, text, statistics, and the stream of one prompt."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.runtime.backends.onnx.tune import Tuning
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.logprobs import Logprob
from accel.runtime.decode.row import STAGES, Row
from accel.runtime.inputs.text import StopMatcher, Tokenizer
from accel.runtime.model.notebook import table
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Output:
    """The result of `generate`.

    Attributes:
        tokens: the new token ids of each prompt.
        text: the new text of each prompt; None without a tokenizer.
        stats: a dict of statistics:

            - `calls`: graph calls; `tokens`: new tokens; `tokens_per_call`; `prompt_tokens`;
            - `reused`: prompt tokens that a prefix cache provided;
            - `exchanged_bytes`: what ranks that shared the prompts sent each other (`prefill.ranks`);
            - `prefill_seconds`, `decode_seconds`; `tokens_per_second`: in decoding, without the first
              token of each group;
            - `kv_bytes`: state of the largest group, in bytes, with that of sessions that draft;
              `peak_memory`: of the process, in bytes;
            - `kernels`: the kernel variant; `costs`: cost of a call of T tokens relative to one
              token, None if not measured on this machine;
            - `speculation`: None if the loop does not draft; else `drafted` and `accepted` tokens,
              `rounds` (rows with a draft), `fallback` (plain steps because drafting was slower),
              `by_place` (tested and accepted tokens by position in the draft), and `seconds` of
              `draft`, `verify` and `host`;
            - `finish`: why each row ended: `eos`, `stop`, `length` or `context`.
        finish_reason: why each text ended, in vLLM's words: "stop" (an end token, a stop string, the end of a
            grammar) or "length" (`max_tokens`, or the context is full).
        stop_reason: the stop string or the one of `stop_token_ids` that ended it; None for all other ends.
        logprobs: for each token of each text a dict of token id -> `Logprob`, the token itself first; None if they
            were not requested.

    With `n` samples per prompt all lists are flat: those of prompt i are at i * n to i * n + n - 1.
    """

    tokens: list[list[int]]
    text: list[str] | None
    stats: dict[str, Any]
    finish_reason: list[str]
    stop_reason: list[int | str | None]
    logprobs: list[list[dict[int, Logprob]]] | None = None

    def _repr_html_(self) -> str:
        shown: Sequence[Any] = self.tokens if self.text is None else self.text
        rows = zip(range(len(shown)), shown, map(len, self.tokens), self.finish_reason, strict=True)
        speed = f"{self.stats['tokens']} tokens, {self.stats['tokens_per_second']:.0f} tokens/s"
        name = "tokens" if self.text is None else "text"
        return table(speed, ["", name, "new tokens", "finish_reason"], rows)


class Transcript:
    """The text of one row, decoded incrementally, cut at the first stop string."""

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

    @property
    def stop(self) -> str | None:
        """The stop string that was reached."""
        return None if self._matcher is None else self._matcher.reason

    def take(self, tokens: int | None = None) -> str:
        """The text that became final since the last call, or with the next so many tokens of it."""
        end = len(self._pieces) if tokens is None else self._taken + tokens
        fresh = "".join(self._pieces[self._taken : end])
        self._taken = min(end, len(self._pieces))
        return fresh

    def finish(self) -> str:
        """The remaining text at the end of a row."""
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


@dataclass(frozen=True)
class Sample:
    """One text that is made: its row, its script, and which of the row's end tokens are the model's own."""

    row: Row
    script: Transcript
    own: frozenset[int]

    @property
    def finish_reason(self) -> str | None:
        """See `Output`; None while it runs."""
        reasons = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
        return reasons.get(self.row.finish)

    @property
    def stop_reason(self) -> int | str | None:
        """See `Output`."""
        if self.row.finish == "eos" and (token := self.row.tokens[-1]) not in self.own:
            return token
        return self.script.stop if self.row.finish == "stop" else None


@dataclass(frozen=True)
class Prepared:
    """A sample that is to be made, and how to open the empty session of one row that it is made in."""

    sample: Sample
    open: Callable[[], Session]


class Meter:
    """Counts and times the calls of one `generate` or `stream`."""

    def __init__(self, tuning: Tuning | None = None, costs: Costs | None = None) -> None:
        self.tuning = tuning
        self.costs = costs
        self.calls = 0
        self.reused = 0
        self.exchanged = 0
        self.kv_bytes = 0
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
            self.kv_bytes = max(self.kv_bytes, session.kv_most + rows[0].beside)
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
    """Iterator over the text pieces or token ids of one prompt. `stats` is available at any time; `close()`
    ends it early.
    """

    def __init__(self, pieces: Iterator[Any], meter: Meter, sample: Sample):
        self._pieces = pieces
        self._meter = meter
        self._sample = sample

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._pieces)

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far. With drafting these can be a few more than were yielded."""
        return list(self._sample.row.tokens)

    @property
    def logprobs(self) -> list[dict[int, Logprob]]:
        """Of `tokens`, as in `Output`; empty if they were not requested."""
        return list(self._sample.row.logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended, as in `Output`; None while it goes on."""
        return self._sample.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """What ended it, as in `Output`."""
        return self._sample.stop_reason

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics so far, as in `Output.stats`."""
        return self._meter.stats([self._sample.row])

    def through(self, change: Callable[[Iterator[Any]], Iterator[Any]]) -> Stream:
        """The same stream, whose pieces `change` passes on. This one must not be used any more."""
        return Stream(change(self._pieces), self._meter, self._sample)

    def close(self) -> None:
        """End the generation and free the session."""
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
