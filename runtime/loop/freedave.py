"""Free draft-and-verification (FreeDave, arXiv:2510.00294): one call verifies several one-token steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.loop._blocks import Blocks
from accel.runtime.loop._canvas import Canvas, Guess, Place


@dataclass(frozen=True)
class Freedave(Blocks):
    """What a call says of the masks is a draft of the next `drafts` steps: candidate k holds the k surest tokens. The
    next call takes all candidates, each in a row of its own, and says what one step makes of each; from the first on,
    which is that step's result, candidates stand as long as one is what a step makes of the one before it.

    So the tokens are those of `dllm-lowconf` with one token per call and the same `canvas`, in fewer calls. Greedy
    only.
    """

    drafts: int = option(4, least=1, most=64)

    relies = frozenset({Invariant.FED_BY_BLOCK})  # a call stands for several

    @property
    def ways(self) -> int:
        return self.drafts

    @property
    def static(self) -> bool:
        return True

    def stays(self, guess: Guess, place: Place | None = None) -> Any:
        return guess.first(1)

    def fill(self, canvas: Canvas) -> Iterator[tuple[int, int]]:
        for row in canvas.rows:
            if row.sampler.distribution(
                np.zeros(canvas.session.vocab_size, np.float32), row.seen
            ).random:
                raise InputError(
                    "loop = freedave verifies greedy one-token-per-call decoding; "
                    "give temperature 0, or build with loop = dllm-lowconf"
                )
        known = canvas.look() if canvas.waiting.any() else {}
        while canvas.waiting.any():
            known = self._round(
                canvas, {i: known[i] for i in np.flatnonzero(canvas.waiting).tolist()}
            )
            yield from canvas.take()

    def _round(self, canvas: Canvas, known: dict[int, Guess]) -> dict[int, Guess]:
        """Commit what stands of a draft; `known`: what was said of each row's masks, and is said after it."""
        hidden = np.repeat(canvas.open[:, None], self.drafts, axis=1)
        order = {
            i: guess.first(min(self.drafts, max(1, len(guess) - 1))) for i, guess in known.items()
        }
        for i, guess in known.items():
            canvas.clear(i)
            for j in range(self.drafts):
                slots = guess.slots[order[i][: j + 1]]
                canvas.ids[i, j, slots], hidden[i, j, slots] = (
                    guess.tokens[order[i][: j + 1]],
                    False,
                )
        counts = np.zeros(len(canvas.rows), np.int64)
        counts[list(known)] = [len(order[i]) if len(guess) > 1 else 0 for i, guess in known.items()]
        found = canvas.branch_out(counts, hidden) if counts.any() else {}
        after = {}
        for i, guess in known.items():
            guesses = found.get(i, [])
            stands = self._standing(guess, order[i], guesses)
            canvas.clear(i)
            canvas.commit(i, guess, order[i][:stands])
            if guesses:
                after[i] = guesses[stands - 1]
        return after

    def _standing(self, draft: Guess, order: Any, guesses: list[Guess]) -> int:
        """How many of the tokens drafted in this `order` are those of as many steps."""
        count = 1
        while count < len(guesses):
            guess, place = guesses[count - 1], order[count]
            (best,) = self.stays(guess)
            if guess.slots[best] != draft.slots[place] or guess.tokens[best] != draft.tokens[place]:
                break
            count += 1
        return count
