"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop import Base
from accel.runtime.loop._branches import BeamGroup, branched
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Template(Base):
    """Which branches go on, and which is the answer: here, the `beams` most likely, and the first of them to end."""

    beams: int = option(4, least=1, most=64)

    grade = "approximate"
    searches = True  # a greedy request gets other tokens than by plain decoding

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if any(not row.sampler.greedy for row in rows):  # leave this out where branches `pick`
            raise InputError(f"{self.full_name} does not sample; leave temperature at 0")
        return branched(session, rows, lambda row: _Branches(row, self))


class _Branches(BeamGroup):
    """Those of one prompt."""

    def __init__(self, row: Row, method: Template):
        super().__init__(row)
        self._method = method
        self._sums = np.zeros(1)  # of each branch's log-probabilities

    def step(self, logits: Logits) -> list[int]:
        totals = self._totals(logits).ravel()
        best = np.argsort(-totals, kind="stable")[: self._method.beams]
        best = best[np.isfinite(totals[best])]  # a request may ban tokens
        parents, tokens = np.divmod(best, logits.shape[1])
        self.branches = [self.branches[parent].branch() for parent in parents]
        for branch, parent, token in zip(self.branches, parents, tokens, strict=True):
            branch.accept(int(token), logits[parent])  # it sets `finish` where the branch ends
        self._sums = totals[best]
        self.best = next((branch for branch in self.branches if branch.finish), None)
        return [int(parent) for parent in parents]

    def _totals(self, logits: Logits) -> npt.NDArray[np.float64]:
        """The log-probability of each branch with each token behind it, [n,V]."""
        found = np.empty(logits.shape)
        for n, (branch, row) in enumerate(zip(self.branches, logits, strict=True)):
            scores = branch.sampler.scores(row, branch.seen).astype(np.float64)
            scores -= scores.max()
            found[n] = self._sums[n] + scores - np.log(np.exp(scores).sum())
        return found
