"""UT5 (arXiv:2311.08552): a text of random tokens is rewritten as a whole, a few times; no token is ever final."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop import Base
from accel.runtime.loop._graph import log_softmax
from accel.runtime.loop._whole import canvas_of, written
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Ut5(Base):
    """A row is its prompt and, for the rest of its length, tokens drawn at random. Each of at most `steps` calls gives
    all of these anew; a row is done where a call changes none. It ends at its first end token.

    A source that arrives in pieces can be translated anew with each in a few calls, as FReTNA (arXiv:2012.14681) does
    with another model: `model.retranslate`.

    With `starts` above 1 a row begins that many times, each with other random tokens, and the text of the largest
    log-probability is taken.
    """

    steps: int = option(8, least=1, most=1024)
    starts: int = option(1, least=1, most=64)

    grade = "approximate"
    lacks = (
        "the training; and FReTNA's start from what was shown, with its insertions and deletions"
    )
    masked_diffusion = True
    searches = True
    breaks = frozenset({Invariant.APPEND_ONLY})

    def unfit(self, facts: Facts) -> str:
        if facts.paths is not None:
            return "gives a graph of tokens; give loop = da-transformer"
        if facts.diffusion is not None and facts.diffusion.shift:
            return "says of each token what follows it, not what it is; give loop = dllm-lowconf"
        return ""

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        canvas = canvas_of(session, self.full_name)
        live = [i for i, row in enumerate(rows) if not row.finish]
        if not live:
            return
        session.select(np.repeat(np.arange(len(rows)), self.starts))
        texts = {i: _Text(rows[i], self.starts, session.vocab_size, canvas.mask) for i in live}
        try:
            for _ in range(self.steps):
                if not (going := self._places(texts)):
                    break
                for place, logits in zip(going, _called(session, going), strict=True):
                    texts[place // self.starts].rewrite(place % self.starts, logits)
                for i in live:
                    if not rows[i].finish and not texts[i].going:
                        yield from texts[i].take(i)
            for i in live:
                yield from texts[i].take(i)
        finally:
            session.select(np.arange(len(rows)) * self.starts)
            session.rewind(0)

    def _places(self, texts: dict[int, _Text]) -> dict[int, Ints]:
        """Row of the session -> the text to run, of those that a call may change."""
        return {i * self.starts + j: text.ids[j] for i, text in texts.items() for j in text.going}


def _called(session: Session, texts: dict[int, Ints]) -> list[Logits]:
    """Logits [n,V] of each text."""
    given = written(session, texts)
    return [given[place, : ids.size] for place, ids in texts.items()]


class _Text:
    """One row's texts, one for each start. going: those that the last call changed."""

    def __init__(self, row: Row, starts: int, vocabulary: int, mask: int | None):
        self.row, self._mask = row, mask
        self._first = row.prompt.size
        self._rngs = [row.rng, *row.rng.spawn(starts - 1)]
        self.ids = [
            np.concatenate([row.prompt, rng.integers(0, vocabulary, row.left)])
            for rng in self._rngs
        ]
        self.scores = [0.0] * starts
        self.going = list(range(starts))

    def rewrite(self, start: int, logits: Logits) -> None:
        """Let a text hold what logits [n,V] say of each token behind the prompt."""
        row, ids, scores = self.row, self.ids[start], logits[self._first :]
        if self._mask is not None:
            scores[:, self._mask] = -np.inf
        tokens = row.sampler.choices(scores)
        if tokens is None:
            rng = self._rngs[start]
            tokens = np.array([row.sampler(one, row.prompt, rng) for one in scores], np.int64)
        ended = next((n + 1 for n, token in enumerate(tokens) if row.ends(int(token))), len(tokens))
        sure = np.take_along_axis(log_softmax(scores.astype(np.float64)), tokens[:, None], 1)
        self.scores[start] = float(sure[:ended].sum())
        if np.array_equal(tokens, ids[self._first :]):
            self.going.remove(start)
        ids[self._first :] = tokens

    def take(self, i: int) -> Iterator[tuple[int, int]]:
        """Let the row accept the best of its texts: (row, token)."""
        best = self.ids[int(np.argmax(self.scores))]
        for token in best[self._first + len(self.row.tokens) :].tolist():
            if self.row.finish:
                return
            self.row.accept(token, None)
            yield i, token
