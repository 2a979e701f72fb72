"""Adaptive decoding (AdaDec, arXiv:2506.08980): where the model is unsure, tokens are tried ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.trained import Tensors
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart
from accel.runtime.loop import Base
from accel.runtime.loop._branches import BeamGroup, branched, refuse_samples
from accel.runtime.session.session import Session

UNLEARNT = 1.0  # nats


@dataclass(frozen=True)
class Adadec(TrainedPart, Base):
    """Greedy decoding, but where the entropy of the next token is `threshold` nats or more. There the `tries` likeliest
    tokens are followed by `ahead` greedy ones each, and the token is taken whose own and following tokens have the
    largest mean log-probability; what followed is dropped. Ties go to the likelier token.

    One try, nothing ahead or an endless threshold is greedy decoding. Requests that sample are refused.

    `threshold` -1: the one that was learnt for the model, `trained`: its file, from `accel-compile train adadec`;
    empty: the one that a build finds. A model without one pauses from 1 nat on, which suits none in particular.
    """

    threshold: float = option(-1.0, least=-1)
    tries: int = option(3, least=1, most=64)
    ahead: int = option(5, least=0, most=1024)
    trained: str = ""

    key: ClassVar[str] = "adadec"
    optional = True
    grade = "approximate"  # other tokens than greedy decoding takes
    relies = frozenset({Invariant.REWIND})
    searches = True

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart."""
        return {"threshold": (1,)}

    @property
    def wants_part(self) -> bool:
        """See TrainedPart."""
        return self.threshold < 0

    @property
    def pauses_at(self) -> float:
        """The least entropy, in nats, at which it tries tokens. Raises InputError where its file holds none."""
        if not self.wants_part:
            return self.threshold
        return float(part["threshold"][0]) if (part := self.part) else UNLEARNT

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        refuse_samples(rows, "adadec", "takes the likeliest tokens")
        pauses_at = self.pauses_at
        return branched(session, rows, lambda row: _Trying(row, self, pauses_at))


@dataclass
class _Try:
    """A token that is tried: `row` has it, `ahead` goes on from it; `after`: logits [V] behind it."""

    row: Row
    ahead: Row
    sums: list[float]
    after: Logits | None = field(default=None)

    @property
    def worth(self) -> float:
        return sum(self.sums) / len(self.sums)


class _Trying(BeamGroup):
    """One way, and where that is unsure the ways that are tried."""

    def __init__(self, row: Row, method: Adadec, pauses_at: float):
        super().__init__(row)
        self._method, self._pauses_at = method, pauses_at
        self._tries: list[_Try] = []

    def step(self, logits: Logits) -> list[int]:
        if not self._tries:
            return self._go_on(self.branches[0], logits[0], 0)
        for n, (tried, line) in enumerate(zip(self._tries, logits, strict=True)):
            if n not in self.waits:
                self._hear(tried, line)
        return self._settled(list(range(len(self._tries))))

    def _go_on(self, row: Row, logits: Logits, parent: int) -> list[int]:
        """The next token of the only way, or the tries for it."""
        method, logs = self._method, _logs(row, logits)
        if method.tries == 1 or not method.ahead or _entropy(logs) < self._pauses_at:
            row.accept(row.pick(logits), logits)
            self.branches, self.waits = [row], frozenset()
            if row.finish:
                self.best = row
            return [parent]
        likeliest = np.argsort(-logs, kind="stable")[: method.tries]
        for token in likeliest[logs[likeliest] > -np.inf].tolist():
            with_it = row.branch()
            with_it.accept(token, logits)
            ahead = with_it.branch(with_logprobs=False)
            self._tries.append(_Try(with_it, ahead, [float(logs[token])]))
        return self._settled([parent] * len(self._tries))

    def _hear(self, tried: _Try, logits: Logits) -> None:
        """Take the likeliest token behind a try."""
        if tried.after is None:
            tried.after = logits.copy()
        token = tried.ahead.pick(logits)
        tried.sums.append(float(_logs(tried.ahead, logits)[token]))
        tried.ahead.accept(token, None)

    def _settled(self, parents: list[int]) -> list[int]:
        """Go on with the tries that are not over; where all are, with the best one's token."""
        most = self._method.ahead + 1
        over = [bool(tried.ahead.finish) or len(tried.sums) == most for tried in self._tries]
        self.branches = [tried.ahead for tried in self._tries]
        self.waits = frozenset(n for n, is_over in enumerate(over) if is_over)
        if not all(over):
            return parents
        best = max(range(len(over)), key=lambda n: (self._tries[n].worth, -n))
        tried, self._tries = self._tries[best], []
        if tried.after is None:  # it ends the answer
            self.best = tried.row
            return [parents[best]]
        return self._go_on(tried.row, tried.after, parents[best])


def _logs(row: Row, logits: Logits) -> npt.NDArray[np.float64]:
    """Log-probabilities [V] of what the request lets follow."""
    scores = row.sampler.scores(logits, row.seen).astype(np.float64)
    scores -= scores.max()
    logs: npt.NDArray[np.float64] = scores - np.log(np.exp(scores).sum())
    return logs


def _entropy(logs: npt.NDArray[np.float64]) -> float:
    """In nats."""
    p = np.exp(logs)
    return float(-(p[p > 0] * logs[p > 0]).sum())
