"""Log-probabilities of generated tokens, as vLLM gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.runtime.call import Logits
from accel.runtime.inputs.text import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the model's own distribution (natural logarithm, before any option of the
    request), its rank (1 is the likeliest), and its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class TopLogprobs:
    """What is told of each token: it, then the `count` likeliest, the likeliest first."""

    count: int
    tokenizer: Tokenizer | None = None

    def __call__(self, token: int, logits: Logits) -> dict[int, Logprob]:
        """By token id; logits [V]: those that the model gave for it, not kept."""
        top = float(logits.max())
        total = top + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
        rank = 1 + int((logits > logits[token]).sum())
        found = {token: (rank, float(logits[token]))}
        for place, other in enumerate(self._best(logits), 1):
            found.setdefault(other, (place, float(logits[other])))
        return {
            one: Logprob(value - total, place, self._text(one))
            for one, (place, value) in found.items()
        }

    def _best(self, logits: Logits) -> list[int]:
        """The likeliest tokens, the lower id first among equals."""
        count = min(self.count, logits.size)
        if not count:
            return []
        least = np.partition(logits, -count)[-count]
        tokens = np.flatnonzero(logits >= least)
        best: list[int] = tokens[np.argsort(-logits[tokens], kind="stable")][:count].tolist()
        return best

    def _text(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token])
