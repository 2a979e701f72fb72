"""Beam search with controlled patience (arXiv:2204.05424): it stops after a set number of finished hypotheses."""

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
from accel.runtime.loop._branches import BeamGroup, branched, refuse_samples
from accel.runtime.session.session import Session

STEEPEST = 50  # a power of a length that stays a number


@dataclass(frozen=True)
class BeamPatience(Base):
    """Each call extends the `beams` most likely beams of a prompt by one token. A beam that ends among the
    first `beams` is a
    hypothesis. The search stops at `beams` times `patience` hypotheses, or when no beam can be better than
    the best one. 1 is the usual beam search; higher values search longer.

    The score of a hypothesis of n tokens, eos included, is the sum of its log-probabilities over n **
    `length_penalty`. Ties go to the lower beam, then to the lower token. A beam that the request lets nothing follow is
    dropped. Requests that sample are refused.
    """

    beams: int = option(4, least=1, most=256)
    patience: float = option(1.0, above=0)
    length_penalty: float = option(1.0, least=-STEEPEST, most=STEEPEST)

    grade = "approximate"  # other tokens than greedy decoding takes, though likelier ones
    searches = True

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        refuse_samples(rows, "beam-patience", "searches for the most likely text")
        return branched(session, rows, lambda row: _Beams(row, self))


class _Beams(BeamGroup):
    """Those of one prompt, the best first."""

    def __init__(self, row: Row, method: BeamPatience):
        super().__init__(row)
        self._method = method
        self._sums = np.zeros(1)  # of each beam's log-probabilities
        self._ended: list[tuple[float, Row]] = []
        self._stuck: InputError | None = None  # why the last beam that nothing may follow ended

    def step(self, logits: Logits) -> list[int]:
        beams, live, sums, parents = self._method.beams, list[Row](), list[float](), list[int]()
        for rank, (total, parent, token) in enumerate(_falling(self._totals(logits))):
            branch = self.branches[parent].branch()
            branch.accept(token, logits[parent])
            if not branch.finish:
                live, sums, parents = [*live, branch], [*sums, total], [*parents, parent]
            elif rank < beams and not self._enough:
                self._ended.append((self._worth(total, len(branch.tokens)), branch))
            if len(live) == beams or (rank + 1 >= beams and branch.finish in ("length", "context")):
                break
        self.branches, self._sums = live, np.array(sums)
        if not live and not self._ended and self._stuck is not None:
            raise self._stuck
        if not live or self._enough or self._hopeless:
            self.best = max(self._ended, key=lambda one: one[0])[1]
        return parents

    def _totals(self, logits: Logits) -> npt.NDArray[np.float64]:
        """The sum of log-probabilities of every way on [n,V]; of a beam that nothing may follow there is none."""
        found = np.full(logits.shape, -np.inf)
        for branch, row, total, line in zip(self.branches, logits, self._sums, found, strict=True):
            try:
                line[:] = branch.sampler.scores(row, branch.seen)
            except InputError as error:
                self._stuck = error
                continue
            line -= line.max()
            line += total - np.log(np.exp(line).sum())
        return found

    def _worth(self, total: float, tokens: int) -> float:
        return float(total / tokens**self._method.length_penalty)

    @property
    def _enough(self) -> bool:
        return len(self._ended) >= self._method.beams * self._method.patience

    @property
    def _hopeless(self) -> bool:
        """Whether no beam can come to more than the best that ended: sums only fall."""
        if not self._ended:
            return False
        now, room = len(self.branches[0].tokens), self.branches[0].left
        longest = now + (room if self._method.length_penalty > 0 else 1)
        return self._worth(self._sums[0], longest) <= max(worth for worth, _ in self._ended)


def _falling(totals: npt.NDArray[np.float64]) -> Iterator[tuple[float, int, int]]:
    """(total, beam, token), the best first, of all that have a probability."""
    flat, given, count = totals.ravel(), 0, 16
    while given < flat.size:
        count = min(4 * count, flat.size)
        least = np.partition(flat, -count)[-count]
        places = np.flatnonzero(flat >= least)  # equals of the last one, too
        places = places[np.argsort(-flat[places], kind="stable")]
        for place in places[given:].tolist():
            if flat[place] == -np.inf:
                return
            yield float(flat[place]), *divmod(place, totals.shape[1])
        given = places.size
