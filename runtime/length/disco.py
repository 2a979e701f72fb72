"""DISCO (arXiv:2405.04304): a small classifier reads what the drafter says and ends the draft where a token will
likely be rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.length._head import Array, spread
from accel.runtime.length._of_rounds import OfRounds, Reader, likely
from accel.runtime.tree import Level

TOP = 10  # likeliest tokens that the head reads
FAR = 20  # tokens: what places in the draft are measured by


@dataclass(frozen=True)
class Disco(OfRounds):
    """Drafts of up to `most` tokens, ended after one that stands, with all before it, with a probability below
    `threshold`; of a tree, after a level whose likeliest token does. `trained`: the head's file, from
    `accel-compile train disco`; empty: the one that is kept for the two models.

    The head reads the ten largest draft probabilities, their entropy and the place in the draft.
    """

    threshold: float = option(0.3, least=0)
    most: int = option(20, least=1, most=256)
    trained: str = ""

    key: ClassVar[str] = "disco"
    drafts = {"draft": {"use": "model"}}

    def reader(self) -> Reader:
        return _Reader()

    @classmethod
    def label(cls, level: int, accepted: int) -> bool:
        """Whether the tokens up to that one stand."""
        return level <= accepted

    @classmethod
    def width(cls) -> int:
        return TOP + 2


class _Reader(Reader):
    """The logarithms of the largest draft probabilities, their entropy, and the place."""

    place = 0

    def read(self, level: Level, logits: Sequence[Logits]) -> Array:
        self.place += 1
        node = int(likely(logits, level).argmax()) if len(logits) > 1 else 0
        _, top, entropy = spread(logits[node][None], TOP)
        return np.concatenate([top[0], entropy[0], [self.place / FAR]]).astype(np.float32)
