"""Improved MCSD (arXiv:2409.10644): after each level of a draft tree a small model decides whether another one is worth
drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from accel.ir.axis import option
from accel.runtime.call import Logits
from accel.runtime.length._head import LEAST, Array, spread
from accel.runtime.length._of_rounds import OfRounds, Reader, likely
from accel.runtime.tree import Level

TOP = 4  # likeliest tokens that the head reads
DEEP = 8  # levels: what depth is measured by


@dataclass(frozen=True)
class McsdImproved(OfRounds):
    """Trees of up to `most` tokens, ended after a level of whose children one stands with a probability below
    `threshold`. `trained`: the head's file, from
    `accel-compile train mcsd-improved`; empty: the one that is kept for the two models.

    The paper's other parts: a tree that ends after a level is the first nodes of the whole one, so its mask is the
    first rows and columns; and first tokens that the target chooses are the draft's root, which the target has chosen,
    greedy or not. More than one of these, of which the best is kept, would change the distribution
    (`tests/runtime/length/test_mcsd_improved.py` enumerates it), so there is none; a greedy target has no second one.

    The model reads how likely the drafter finds the likeliest path so far and all paths, what it said there, and
    the depth.
    """

    threshold: float = option(0.5, least=0)
    most: int = option(31, least=1, most=512)
    trained: str = ""

    key: ClassVar[str] = "mcsd-improved"
    drafts = {
        "draft": {"use": "model"},
        "tree": {"use": "static", "widths": [3, 2, 1, 1, 1]},
        "verify": {"use": "rrs-wor"},
    }

    def reader(self) -> Reader:
        return _Reader()

    @classmethod
    def label(cls, level: int, accepted: int) -> bool:
        """Whether a token of the next level stands; it was drafted, as the tree went on."""
        return accepted > level

    @classmethod
    def width(cls) -> int:
        return TOP + 5


class _Reader(Reader):
    """How likely the drafter finds the likeliest path to the level, and all of them; what it says where that path's
    last token was chosen; and the depth.
    """

    def __init__(self) -> None:
        self._paths = [0.0]  # the logarithm of each node's chance with those before it; the root's
        self._depth = 0

    def read(self, level: Level, logits: Sequence[Logits]) -> Array:
        self._depth += 1
        own = likely(logits, level)
        paths = np.maximum([self._paths[parent] for parent in level.parents] + own, LEAST)
        self._paths += paths.tolist()
        best = int(paths.argmax())
        _, top, entropy = spread(logits[best][None], TOP)
        found = [paths[best], np.log(np.exp(paths).sum()), max(own[best], LEAST)]
        return np.array([*found, *top[0], *entropy[0], self._depth / DEEP], np.float32)
