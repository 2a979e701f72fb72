"""Loops that go several ways from one prompt: the ways are rows of the session, beside those of other prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress

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
    answer, once that is known.
    """

    def __init__(self, row: Row):
        self.branches = [row.branch()]
        self.waits = frozenset[int]()
        self.best: Row | None = None

    @abstractmethod
    def step(self, logits: Logits) -> list[int]:
        """Take the logits [n,V] after each of the n branches and change `branches`, or find the `best`; a line of a
        branch that waited says nothing. Gives the branch that each new one goes on from. A new one may have fewer
        tokens than the session holds of that: then the session goes back.
        """


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
    held = start.copy()  # what is known to hold of each row's tokens
    try:
        while groups:
            chosen = [np.zeros(1, np.int64) for _ in rows]
            for i, part in enumerate(np.split(logits, sizes.cumsum()[:-1])):
                if i in groups:
                    before = groups[i].branches
                    chosen[i] = np.array(groups[i].step(part))
                    if (best := groups[i].best) is not None:
                        chosen[i], common = _nearest(before, best)
                        held[i] = start[i] + common
            session.select(
                np.concatenate([a + b for a, b in zip(chosen, sizes.cumsum() - sizes, strict=True)])
            )
            sizes = np.array([rows_of.size for rows_of in chosen])
            done = {i: group.best for i, group in groups.items() if group.best is not None}
            for i, best in done.items():
                del groups[i]
                rows[i].follow(best)
            for i, best in done.items():
                yield from ((i, token) for token in best.tokens)
            if groups:
                _go_back(session, groups, sizes, start)
                logits = _run(session, groups, sizes)
    finally:
        with suppress(InputError):  # of a session that a failed call closed
            leave(session, sizes, held)


def _go_back(session: Session, groups: dict[int, BeamGroup], sizes: Ints, start: Ints) -> None:
    """Let each branch's row hold all of its tokens but the last, `start` [B] being the prompts' lengths."""
    first, lengths = sizes.cumsum() - sizes, session.lengths
    wanted = lengths.copy()
    for i, group in groups.items():
        there = slice(int(first[i]), int(first[i] + sizes[i]))
        wanted[there] = [start[i] + len(branch.tokens) - 1 for branch in group.branches]
    if (wanted < lengths).any():
        session.rewind(np.minimum(wanted, lengths))


def _run(session: Session, groups: dict[int, BeamGroup], sizes: Ints) -> Logits:
    """The logits [R,V] after the last token of each branch, in one call."""
    column, counts = np.zeros((int(sizes.sum()), 1), np.int64), np.zeros(int(sizes.sum()), np.int64)
    first = sizes.cumsum() - sizes
    for i, group in groups.items():
        there = slice(int(first[i]), int(first[i] + sizes[i]))
        column[there, 0] = [branch.tokens[-1] for branch in group.branches]
        counts[there] = [n not in group.waits for n in range(len(group.branches))]
    return session.run(column, None if counts.all() else counts)[:, 0]


def _nearest(branches: list[Row], best: Row) -> tuple[Ints, int]:
    """The branch whose tokens, all of them held, have most in common with the first of `best` [1], and how many
    these are; its last token counts as not held.
    """
    found = []
    for branch in branches:
        both = min(len(branch.tokens), len(best.tokens) - 1)
        differ = np.flatnonzero(np.not_equal(branch.tokens[:both], best.tokens[:both]))
        found.append(int(differ[0]) if differ.size else both)
    nearest = int(np.argmax(found))
    return np.array([nearest]), found[nearest]


def leave(session: Session, sizes: Ints, lengths: Ints) -> None:
    """Let the session have a row for each prompt again, of `lengths` [B] tokens; none where it cannot go back."""
    session.select(sizes.cumsum() - sizes)
    try:
        session.rewind(np.minimum(lengths, session.lengths))
    except InputError:
        session.rewind(np.where(lengths < session.lengths, 0, session.lengths))
