"""First Finish Search (arXiv:2505.18149): draw several samples of a prompt in parallel; the first that ends
is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.loop._branches import BeamGroup, branched
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class FirstFinish(Base):
    """`samples` per prompt, one token of each per call; a greedy request has one, because all would be
    equal. The first sample
    equals plain decoding with the same seed. If several reach eos or a stop string in one call, the first is
    used; if none does in time, the one with the highest mean log-probability. A sample that the request lets nothing
    follow is dropped.
    """

    samples: int = option(4, least=1, most=256)

    grade = "approximate"  # answers are shorter than those that the model alone would give

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        return branched(session, rows, lambda row: _Samples(row, self.samples))


class _Samples(BeamGroup):
    """Those of one prompt."""

    def __init__(self, row: Row, samples: int):
        super().__init__(row)
        self._count = 1 if row.sampler.greedy else samples
        self._worth = np.zeros(self._count)  # the sum of the log-probabilities of each one's tokens

    def step(self, logits: Logits) -> list[int]:
        parents = list(range(len(self.branches)))
        (first, *others) = self.branches
        if not first.tokens and not others:  # the prompt's
            self.branches += [first.branch(rng) for rng in first.rng.spawn(self._count - 1)]
            parents, logits = [0] * self._count, np.repeat(logits, self._count, axis=0)
        goes_on, stuck = np.ones(len(self.branches), np.bool_), list[InputError]()
        for n, (branch, row) in enumerate(zip(self.branches, logits, strict=True)):
            try:
                branch.accept(branch.pick(row), row)
            except InputError as error:
                goes_on[n] = False
                stuck.append(error)
        self.branches = [branch for branch, on in zip(self.branches, goes_on, strict=True) if on]
        if not self.branches:
            raise stuck[0]
        logits, self._worth = logits[goes_on], self._worth[goes_on]
        drawn = logits[np.arange(len(logits)), [branch.tokens[-1] for branch in self.branches]]
        top = logits.max(1)
        self._worth += drawn - top - np.log(np.exp(logits - top[:, None]).sum(1, dtype=np.float64))
        ended = [branch for branch in self.branches if branch.finish in ("eos", "stop")]
        if ended:
            self.best = ended[0]
        elif self.branches[0].finish:  # all of them, for want of room
            self.best = self.branches[int(self._worth.argmax())]
        return [parent for parent, on in zip(parents, goes_on, strict=True) if on]
