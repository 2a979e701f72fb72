"""What all drafters that run a model beside the target have in common: its session, and looking back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from accel.ir.errors import AccelError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft._by_logits import ByModel
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Sampler
from accel.runtime.speculation.follow import Follower, opening, reads_whole

CHAIN = 4  # tokens of a draft that would have been
SURE = 2  # drafts that are made before more than the end of a prompt is read


class Beside(ByModel):
    """Where all rows are greedy they look back first. At first they read the end of their prompts only; the whole of a
    prompt is read where drafts were made, and enough tokens are to come.
    """

    def __init__(
        self,
        follower: Follower,
        rows: Sequence[Row],
        context: DecodeContext,
        vocab_size: int,
        draft_cost: float,
    ):
        super().__init__(rows, context, vocab_size, draft_cost)
        self._follower, self._context = follower, context
        self.probes = all(row.sampler.greedy for row in rows)
        self._made = 0  # drafts
        if context.model is not None and context.model.draft_model is not None:
            self.opening = opening(context.model.draft_model, context, rows, follower.opens)

    @property
    def joins(self) -> bool:
        return self._follower.joins

    def join(self, other: Self) -> None:
        super().join(other)
        self._follower.join(other._follower)

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._follower.leave(order)

    @property
    def kv_bytes(self) -> int:
        return self._follower.kv_bytes

    def probe(self, rows: Sequence[int]) -> Sequence[tuple[int, int]]:
        known = {i: self.rows[i].prompt.size for i in rows}
        self._end(rows)
        seen = {i: self.rows[i].seen for i in rows if self.most(i, 1) > 0}
        found = self._follower.probe(seen, known) if seen else {}
        return [
            draft for i, (first, logits) in found.items() for draft in self._would(i, first, logits)
        ]

    def begin(self, rows: Iterable[int]) -> None:
        """These rows draft: read from now on the whole of those where that pays. It comes before `most`, as there is
        less room behind a whole row.
        """
        self._end(rows)
        self._made += 1
        model = None if self._context.model is None else self._context.model.draft_model
        for i in rows:
            row, size = self.rows[i], self.rows[i].seen.size
            if self._follower.cut[i] and self._made > SURE and self._follower.most(size, 1) > 0:
                if model is None or reads_whole(model, self._context, row):
                    self._follower.whole(i)

    def _end(self, rows: Iterable[int]) -> None:
        """Read these rows from near the end of their prompts on, where nothing is known of what drafts are worth."""
        if self._context.costs is not None:
            for i in rows:
                self._follower.ending(i, self.rows[i].prompt.size)

    def follow(self, rows: Sequence[int]) -> Logits:
        """Let the model hold these rows' committed tokens: the logits [B,1,V] after each."""
        return self._follower.follow({i: self.rows[i].seen for i in rows})

    def most(self, row: int, limit: int) -> int:
        """Tokens that a row may draft now, of `limit`."""
        return self._follower.most(self.size(row), limit)

    def size(self, row: int) -> int:
        """Tokens of a row, but for those at its beginning that the model leaves out."""
        return self.rows[row].seen.size - int(self._follower.cut[row])

    def _would(self, i: int, first: int, logits: Logits) -> list[tuple[int, int]]:
        """What chains of a row would have been from its token number `first` on, by what was said [n,V] of that and
        each after it: how many tokens, and how many of them stand.
        """
        row, drafts, stood = self.rows[i], list[tuple[int, int]](), 0
        logits = logits[:, : self._vocab]
        said = row.sampler.choices(logits)
        if said is None:
            lines = enumerate(logits, first)
            said = np.array([choice(row.sampler, line, row.seen[:n]) for n, line in lines])
        for stands in (said == row.seen[first : first + said.size]).tolist():
            stood += stands
            if not stands or stood == CHAIN:
                drafts.append((stood + (not stands), stood))
                stood = 0
        return [*drafts, (stood, stood)] if stood else drafts

    def close(self) -> None:
        self._follower.close()


def choice(sampler: Sampler, logits: Logits, seen: Ints) -> int:
    """The token that a greedy sampler takes after `seen`; -1: none, because of an error there, as in `ByModel.law`."""
    try:
        return int(sampler.distribution(logits, seen).tokens[0])
    except AccelError:
        return -1
