"""Adaptive parallel decoding (APD, arXiv:2506.00413): a small causal model says how many of the tokens that one call
draws for masks go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import AccelError, InputError
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Canvas, Floats, Guess, Place
from accel.runtime.sample import Distribution
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower, second


@dataclass(frozen=True)
class Apd(Blocks):
    """Text is filled from left to right. A call draws the next `block` masks, and sees no masks behind them; the causal
    model of `draft` reads what was drawn. Drawn again from the product of both models' distributions, the masked
    model's to the power of `mixture` and the causal one's to 1 - `mixture`, with the same random numbers (Gumbel
    noise), tokens stay up to the first that becomes another one. The first always stays.

    `mixture` = 1 keeps all of a call, `block` = 1 is one token per call. The request's sampler shapes both
    distributions (the paper's code draws again with temperature 0, and cuts the first distribution alone). The causal
    model must have the tokens of the masked one. What a call computes is up to `canvas`, as the paper's recomputed
    window is (`recompute-window`); methods of it that go by the calls of a block compute all in each call.
    """

    block: int = 100
    mixture: float = option(0.7, least=0, most=1)

    asks = {"canvas": "whole", "draft": ""}
    relies = frozenset({Invariant.DRAFT_MODEL})

    def opened(self, session: Session, rows: list[Row], context: DecodeContext) -> Canvas:
        return _Sliding(session, rows, self, context)

    def begin(self, row: Row) -> _Memory:
        return _Memory(row)

    def fill(self, canvas: Canvas) -> Iterator[tuple[int, int]]:
        """One call."""
        assert isinstance(canvas, _Sliding)
        start, total = perf_counter(), canvas.counts
        guesses = canvas.ahead()
        drawn = perf_counter()
        lines = canvas.read(guesses)
        checked = perf_counter()
        for i, said in lines.items():
            place = canvas.place(i, 0, int(total[i]))
            place.memory.said = said
            stays = self.stays(guesses[i], place)
            canvas.commit(i, guesses[i], stays)
            canvas.stay(i, len(stays))
            canvas.rows[i].drafting.update(rounds=1, drafted=len(guesses[i]), accepted=len(stays))
        canvas.rows[0].clock(drawn - start, checked - drawn, perf_counter() - start)  # for all
        yield from canvas.take()

    def stays(self, guess: Guess, place: Place) -> Any:
        """The first places, up to a token that the product of both distributions would not have drawn."""
        memory: _Memory = place.memory
        count = 1
        if self.mixture < 1:
            known = min(guess.logits.shape[1], memory.said.shape[1])
            mixed = np.full_like(guess.logits, -np.inf)
            own = guess.logits[:, :known]
            with np.errstate(invalid="ignore"):  # 0 of a token that never comes
                both = self.mixture * own + (1 - self.mixture) * memory.said[: len(guess), :known]
            mixed[:, :known] = np.where(np.isneginf(own), own, both)
            while count < len(guess) and memory.drawn(count, mixed[count]) == guess.tokens[count]:
                count += 1
            return np.arange(count)
        return np.arange(len(guess))


class _Memory:
    """Of one row: the random numbers of its newest draws, and what the causal model says of each drawn token, logits
    [n+1,V] from those before it, the last of what follows them.
    """

    said: Logits

    def __init__(self, row: Row):
        self._row, self._seen, self._seed = row, row.prompt, 0

    def begin(self, seen: Ints) -> None:
        """Draws behind these tokens, with new numbers."""
        self._seen, self._seed = seen, int(self._row.rng.integers(1 << 63))

    def drawn(self, place: int, logits: Floats) -> int:
        """The token of a place by logits [V]: with the noise of that place, whatever the logits."""
        law = self._row.sampler.distribution(logits, self._seen)
        return coupled(law, (self._seed, place), logits.size) if law.random else int(law.tokens[0])


def coupled(law: Distribution, seed: tuple[int, ...], size: int) -> int:
    """A draw from a distribution over `size` tokens, by Gumbel noise: those of near distributions are mostly the same
    with the same seed.
    """
    noise = np.random.default_rng(seed).gumbel(size=size)
    with np.errstate(divide="ignore"):
        scores = np.log(law.weights.astype(np.float64)) + noise[law.tokens]
    return int(law.tokens[scores.argmax()])


class _Sliding(Canvas):
    """Each row's block begins at its first mask, and calls see none behind it. The causal model follows the rows."""

    def __init__(self, session: Session, rows: list[Row], loop: Apd, context: DecodeContext):
        model = second(context, loop)
        memory = [loop.begin(row) for row in rows]
        super().__init__(session, rows, loop.block, context.methods["canvas"], 1, memory)
        self._never = np.append(
            self._never,
            np.arange(min(session.vocab_size, model.facts.vocab_size), session.vocab_size),
        )
        self._follower = Follower(model, len(rows))
        self._after: dict[int, Logits] = {}  # what the causal model says behind each row, [V]
        begin_figures(rows)
        longest = int(self.ends.max())
        if longest > model.facts.max_context:
            self._follower.close()
            raise InputError(
                f"{loop.full_name}: a prompt and its answer may have {longest} tokens, and the model of [draft] reads "
                f"{model.facts.max_context}; give fewer (max_new_tokens), or build that one with more: max_context=…"
            )

    def advance(self) -> bool:
        self._step = 0
        gaps = self.open.any(axis=1)
        self.first = np.where(gaps, self.open.argmax(axis=1), self.ends)
        self.last = np.minimum(self.first + self._block, self.ends)
        return bool(self.live.any())

    @property
    def sight(self) -> Ints:
        return self.last

    def ahead(self) -> dict[int, Guess]:
        """One call; what it says of each row's masks up to the first that it says nothing of, and of no more than the
        causal model can take back.
        """
        found = self.look()
        for i, guess in found.items():
            first = int(self.first[i])
            count = int((guess.slots == first + np.arange(len(guess))).cumprod().sum())
            if not count:
                raise AccelError(
                    f"{self._method.full_name} does not compute the first mask of row {i}, and loop = apd fills from "
                    "left to right; let feeds name it (Sheet.asked)"
                )
            found[i] = guess.before(first + max(1, self._follower.most(first, count)))
        return found

    def _drawn(self, i: int, scores: Floats, seen: Ints) -> Ints:
        memory: _Memory = self._memory[i]
        memory.begin(seen)
        return np.array([memory.drawn(place, one) for place, one in enumerate(scores)], np.int64)

    def read(self, guesses: Mapping[int, Guess]) -> dict[int, Logits]:
        """What the causal model says of each token that was drawn and of what follows, [n+1,V] of each row, in one
        call.
        """
        new = {i: self.rows[i].seen for i in guesses if i not in self._after}
        if new:
            logits = self._follower.follow(new)
            self._after |= {i: logits[i, 0] for i in new}
        logits = self._follower.run({i: one.tokens for i, one in guesses.items()}, last_only=False)
        return {
            i: np.concatenate([self._after[i][None], logits[i, : len(one)]])
            for i, one in guesses.items()
        }

    def stay(self, i: int, count: int) -> None:
        """So many of the tokens that were read of a row stay."""
        self._after[i] = self._memory[i].said[count]
        self._follower.back({i: int(self.first[i]) + count})

    def close(self) -> None:
        self.rows[0].draft_kv_bytes = max(self.rows[0].draft_kv_bytes, self._follower.kv_bytes)
        self._follower.close()
        super().close()
