"""What a session does to a prompt: the tokens that a recipe's filter leaves of it, and those that its deeper
layers see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.prefill import Pick, Prefill, Segments
from accel.runtime.backends.protocol import Logits, Stepper
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.observers.observer import Companion

Scores = npt.NDArray[np.float32]


def picks(plan: Pick, scores: Scores) -> Ints:
    """Which of the tokens that are worth `scores` [n] stay, in order: the newest, then the first, then the
    best; of equals the earlier. What is no number is worth least.
    """
    count = scores.size
    if count <= plan.tokens:
        return np.arange(count)
    worth = np.nan_to_num(scores.astype(np.float64), nan=-np.finfo(np.float64).max)
    worth[: plan.sinks] = np.inf
    rank = np.argsort(-worth, kind="stable")
    late = rank >= count - plan.recent
    rank = np.concatenate([np.sort(rank[late])[::-1], rank[~late]])
    return np.sort(rank[: plan.tokens])


def unseen(plan: Prefill | None, count: int) -> int:
    """How many of a prompt's `count` tokens no layer sees as the model's own."""
    return 0 if plan is None or plan.filter is None else max(0, count - plan.filter.tokens)


def filtered(
    plan: Pick, stepper: Stepper, ids: Ints, counts: Ints, chunk: int
) -> tuple[Ints, Ints, int]:
    """What is left of prompts [B,T], of which `counts` [B] tokens are real: ids [B,K], how many of a row
    are real [B], and the graph calls that it took, each of at most `chunk` columns. `stepper`: an empty one.
    """
    longest = int(counts.max())
    stepper.resize(-(-longest // chunk) * chunk)
    every = np.arange(ids.shape[1])
    part = _Part("filter", stepper, np.where(every < counts[:, None], every, -1), counts, chunk)
    worth = part.run({"tokens": ids})["scores"]
    picked = [picks(plan, row[0, :n]) for row, n in zip(worth, counts, strict=True)]
    return *_taken(ids, picked), part.calls


def in_segments(
    plan: Segments,
    ids: Ints,
    counts: Ints,
    dense: Callable[[Ints, Ints, Ints, Ints, int], Logits],
    sparse: Callable[[Ints, Ints, Ints, int], None],
) -> Logits:
    """Run prompts [B,T] of `counts` [B] real tokens from an empty cache on, segment by segment; the logits
    [B,1,V] after each row. Rows whose segment is their last go by `dense` (tokens, positions, slots, rows,
    real tokens), those for whom it is one between by `sparse`; to the other call a row is padding, which
    is written behind its segment.
    """
    out: Logits | None = None
    for start in range(0, int(counts.max()), plan.tokens):
        part = ids[:, start : min(start + plan.tokens, int(counts.max()))]
        end, columns = start + part.shape[1], np.arange(part.shape[1])
        between = (counts > end) & (start >= plan.threshold)
        for rows, skips in ((~between & (counts > start), False), (between, True)):
            if not rows.any():
                continue
            real = rows[:, None] & (start + columns < counts[:, None])
            positions = np.where(real, start + columns, -1)
            slots = np.where(rows, start, np.minimum(counts, end))
            if skips:
                sparse(part, positions, slots, int(real.sum()))
                continue
            ends = rows & (counts <= end)
            last = np.where(ends, counts - start - 1, 0)[:, None]
            logits = dense(part, positions, slots, last, int(real.sum()))
            out = np.zeros_like(logits) if out is None else out
            out[ends] = logits[ends]
    assert out is not None  # the last segment is dense
    return out


class Pruner(Companion):
    """What a session knows of tokens that the layers after each stage do not hold.

    `dropped` [stages,B]: how many. `ends` [B]: tokens of a prompt that was pruned; 0: none was.
    """

    def __init__(self, plan: tuple[Pick, ...], batch: int):
        self.plan = plan
        self.dropped: Ints = np.zeros((len(plan), batch), np.int64)
        self.ends: Ints = np.zeros(batch, np.int64)

    @property
    def held_from(self) -> Ints:
        """See Companion."""
        return self.ends.copy()

    def copy(self) -> Self:
        """Of its own."""
        other = type(self)(self.plan, self.ends.size)
        other.dropped, other.ends = self.dropped.copy(), self.ends.copy()
        return other

    def select(self, rows: Ints) -> None:
        """See Companion."""
        self.dropped, self.ends = self.dropped[:, rows], self.ends[rows]

    def prunes(self, counts: Ints) -> bool:
        """Whether prompts of so many tokens are."""
        return int(counts.max()) > min(plan.tokens for plan in self.plan)

    def slots(self, ends: Ints) -> list[int]:
        """How many slots the layers after each stage need where those before need `ends` [B]."""
        return [int((ends - gone).max()) for gone in self.dropped]

    def check(self, wanted: Ints, lengths: Ints) -> None:
        """Raises InputError where rows would go back to within a pruned prompt."""
        if (bad := (wanted < self.ends) & (wanted > 0)).any():
            row = int(bad.argmax())
            raise InputError(
                f"cannot rewind row {row} to {wanted[row]}: deeper layers dropped tokens of its prompt of "
                f"{self.ends[row]}, and which they would hold of fewer is not known; give {self.ends[row]} "
                "or more, or 0"
            )

    def rewind(self, stepper: Stepper, wanted: Ints, lengths: Ints) -> bool:
        """See Companion."""
        self.dropped[:, wanted == 0] = 0
        self.ends[wanted == 0] = 0
        return False

    def room(self, counts: Ints) -> list[int]:
        """How many slots prompts of `counts` [B] tokens take in each part."""
        longest = int(counts.max())
        return [longest, *(min(longest, plan.tokens) for plan in self.plan)]

    def prompt(
        self,
        stepper: Stepper,
        tokens: Ints,
        counts: Ints,
        chunk: int,
        need: Callable[[Stepper, list[int]], None],
    ) -> tuple[Logits, int] | None:
        """Run prompts that are long enough part by part; see Companion."""
        if not self.prunes(counts):
            return None
        need(stepper, self.room(counts))
        stepper.forget(np.ones(len(tokens), bool))
        every = np.arange(tokens.shape[1])
        positions = np.where(every < counts[:, None], every, -1)
        given: dict[str, npt.NDArray[Any]] = {"tokens": tokens}
        left, calls, dropped = counts, 0, []
        for index, plan in enumerate(self.plan):
            part = _Part(f"prompt.{index}", stepper, positions, counts, chunk)
            out = part.run(given)
            calls += part.calls
            picked = [picks(plan, row[0, :n]) for row, n in zip(out["scores"], left, strict=True)]
            stream, left = _taken(out["stream"], picked)
            positions, _ = _taken(positions, picked, -1)
            dropped.append(counts - left)
            given = {"stream": stream}
        part = _Part(f"prompt.{len(self.plan)}", stepper, positions, counts, chunk)
        logits: Logits = part.run(given)["logits"] * (counts > 0)[:, None, None]
        self.dropped = np.stack(dropped)
        self.ends = np.where(self.dropped.any(0), counts, 0)
        return logits, calls + part.calls


class _Part:
    """One entry over prompts, whose tokens have these positions [B,K] (-1: padding) of `counts` [B]."""

    def __init__(self, entry: str, stepper: Stepper, positions: Ints, counts: Ints, chunk: int):
        self.calls = 0
        self._entry, self._stepper, self._chunk = entry, stepper, chunk
        self._positions, self._counts = positions, counts

    def run(self, given: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """`stream`: of all columns; anything else: of the call that a row's last token is in."""
        found: dict[str, npt.NDArray[Any]] = {}
        streams = []
        left = (self._positions >= 0).sum(1)
        for start in range(0, int(left.max()), self._chunk):
            columns = slice(start, min(start + self._chunk, int(left.max())))
            out = self._call({n: a[:, columns] for n, a in given.items()}, columns, left)
            if "stream" in out:
                streams.append(out.pop("stream"))
            ends = (left > start) & (left <= columns.stop)
            for name, array in out.items():
                found.setdefault(name, np.zeros_like(array))
                found[name][ends] = array[ends]
        return {**found, **({"stream": np.concatenate(streams, axis=1)} if streams else {})}

    def _call(
        self, given: dict[str, npt.NDArray[Any]], columns: slice, left: Ints
    ) -> dict[str, npt.NDArray[Any]]:
        positions = self._positions[:, columns]
        width = positions.shape[1]
        rows = np.clip(left - columns.start - 1, 0, width - 1)[:, None]
        slots = np.where(positions[:, 0] >= 0, positions[:, 0], self._counts)
        self.calls += 1
        told = {"positions": positions, "slots": slots, "rows": rows}
        return self._stepper.part(self._entry, {**given, **told})


def _taken(
    values: npt.NDArray[Any], picked: list[Ints], fill: int = 0
) -> tuple[npt.NDArray[Any], Ints]:
    """Each row's picked columns of values [B,T,…], on the left, and how many they are [B]."""
    left = np.array([p.size for p in picked])
    found = np.full((len(values), max(1, int(left.max())), *values.shape[2:]), fill, values.dtype)
    for row, value, places in zip(found, values, picked, strict=True):
        row[: places.size] = value[places]
    return found, left
