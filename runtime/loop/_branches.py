"""Loops that go several ways from one prompt: the ways are rows of the session, beside those of other prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session


class BeamGroup(ABC):
    """The ways of one prompt. `branches`: those that go on, each with a last token that the session has not seen;
    at first one without any. `waits`: the places of those that the next call leaves out. `best`: the one that is the
    answer, once that is known. `reads`: whether `lines` are wanted, of each branch the logits [k,V] behind each of the
    k tokens that the last call ran of it.
    """

    reads: ClassVar[bool] = False

    def __init__(self, row: Row):
        self.branches = [row.branch()]
        self.waits = frozenset[int]()
        self.best: Row | None = None
        self.lines: list[Logits] = []

    @abstractmethod
    def step(self, logits: Logits) -> list[int]:
        """Take the logits [n,V] after each of the n branches and change `branches`, or find the `best`; a line of a
        branch that waited says nothing. Gives the branch that each new one goes on from. A new one may have any tokens:
        the session goes back to those that both begin with, and runs the others of it in one call.
        """


@dataclass
class _Held:
    """What a row of the session holds of a branch: its first `count` tokens; `row` may take others since."""

    row: Row
    count: int = 0

    def common(self, branch: Row, waits: bool = False) -> int:
        """The tokens that the row may keep for a branch: not the last one, which is to be run unless it `waits`."""
        both = min(self.count, len(branch.tokens) - (not waits))
        if branch is self.row:
            return both
        start = self.row.prompt.size
        differ = np.flatnonzero(
            self.row.seen[start : start + both] != branch.seen[start : start + both]
        )
        return int(differ[0]) if differ.size else both


def refuse_samples(rows: list[Row], loop: str, why: str) -> None:
    """Raise InputError where a request samples, which a `loop` does not."""
    if any(not row.sampler.greedy for row in rows):
        raise InputError(
            f"loop = {loop} {why} and does not sample; leave temperature at 0, or build with another loop"
        )


def branched(
    session: Session, rows: list[Row], begin: Callable[[Row], BeamGroup]
) -> Iterator[tuple[int, int]]:
    """What `loop.Base.tokens` gives, of rows whose tokens are known when their search is over.

    A prompt runs once and becomes as many rows as its group has branches; of one that is done a row is left, which
    holds as much of the answer as any did.
    """
    groups = {i: begin(row) for i, row in enumerate(rows) if not row.finish}
    if not groups:
        return
    logits = prompted(session, rows)[:, 0]
    start, sizes = session.lengths, np.ones(len(rows), np.int64)
    kept = start.copy()  # what is known to hold of each row's tokens
    holds = {i: [_Held(group.branches[0])] for i, group in groups.items()}
    try:
        while groups:
            chosen = [np.zeros(1, np.int64) for _ in rows]
            for i, part in enumerate(np.split(logits, sizes.cumsum()[:-1])):
                if i in groups:
                    chosen[i] = np.array(groups[i].step(part))
                    if (best := groups[i].best) is not None:
                        common = [held.common(best) for held in holds[i]]
                        chosen[i] = np.array([np.argmax(common)])
                        kept[i] = start[i] + max(common)
                    holds[i] = [replace(holds[i][parent]) for parent in chosen[i]]
            session.select(
                np.concatenate([a + b for a, b in zip(chosen, sizes.cumsum() - sizes, strict=True)])
            )
            sizes = np.array([rows_of.size for rows_of in chosen])
            done = {i: group.best for i, group in groups.items() if group.best is not None}
            for i, best in done.items():
                del groups[i], holds[i]
                rows[i].follow(best)
            for i, best in done.items():
                yield from ((i, token) for token in best.tokens)
            if groups:
                logits = _run(session, groups, holds, sizes)
    finally:
        with suppress(InputError):  # of a session that a failed call closed
            leave(session, sizes, kept)


def _run(
    session: Session, groups: dict[int, BeamGroup], holds: dict[int, list[_Held]], sizes: Ints
) -> Logits:
    """The logits [R,V] after the last token of each branch: rows go back to what their branches have in common with
    what they hold, and one call runs the rest.
    """
    first, new = sizes.cumsum() - sizes, [list[int]() for _ in range(int(sizes.sum()))]
    back = np.zeros(len(new), np.int64)
    for i, group in groups.items():
        for n, (held, branch) in enumerate(zip(holds[i], group.branches, strict=True)):
            common = held.common(branch, n in group.waits)
            back[first[i] + n] = held.count - common
            held.row, held.count = branch, common
            if n not in group.waits:
                new[first[i] + n], held.count = branch.tokens[common:], len(branch.tokens)
    if back.any():
        session.rewind(session.lengths - back)
    counts = np.array([len(tokens) for tokens in new])
    columns = np.zeros((counts.size, max(1, int(counts.max()))), np.int64)
    for column, tokens in zip(columns, new, strict=True):
        column[: len(tokens)] = tokens
    reads = any(group.reads for group in groups.values())
    whole = None if (counts == columns.shape[1]).all() else counts
    logits = session.run(columns, whole, last_only=not reads)
    if not reads:
        return logits[:, 0]
    for i, group in groups.items():
        there = range(int(first[i]), int(first[i] + sizes[i]))
        group.lines = [logits[place, : counts[place]] for place in there] if group.reads else []
    last: Logits = logits[np.arange(counts.size), np.maximum(counts - 1, 0)]
    return last


def leave(session: Session, sizes: Ints, lengths: Ints) -> None:
    """Let the session have a row for each prompt again, of `lengths` [B] tokens; none where it cannot go back."""
    session.select(sizes.cumsum() - sizes)
    try:
        session.rewind(np.minimum(lengths, session.lengths))
    except InputError:
        session.rewind(np.where(lengths < session.lengths, 0, session.lengths))
