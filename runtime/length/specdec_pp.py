"""SpecDec++ (arXiv:2405.19715): a trained head predicts acceptance, and the draft ends when a rejection is likely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.trained import Tensors
from accel.runtime.call import Logits
from accel.runtime.length import Pace
from accel.runtime.length._head import Array, OfTokens, chance, silu, spread
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level

TOP, BLOCKS = 16, 3  # likeliest tokens that the head reads, and residual blocks that it has


@dataclass(frozen=True)
class SpecdecPp(OfTokens):
    """Drafts of `least` to `most` tokens, ended when the probability of a rejection is above `threshold`; trees, when
    it is on every path (`least`: levels).
    `trained`: the head's file, from
    `accel-compile train specdec-pp`; empty: the one that is kept for the two models.

    The head reads the draft probabilities; the paper's reads the hidden state. Other models than it was trained for
    are refused.
    """

    threshold: float = option(0.3, least=0, most=1)
    least: int = option(2, least=1)
    most: int = option(20, least=1, most=256)
    trained: str = ""

    lacks = "a head that reads the hidden state (it reads draft probabilities)"
    key: ClassVar[str] = "specdec-pp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise RecipeError(
                f"{self.full_name}: least is {self.least}, more than most = {self.most}; give at most that many"
            )

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self, self.part)

    @classmethod
    def sizes(cls, inner: int) -> dict[str, tuple[int, ...]]:
        """See Head."""
        blocks = {f"block{i}": (inner, inner) for i in range(BLOCKS)}
        found = {"first": (TOP + 2, inner), **blocks, "last": (inner, 2)}
        return {**found, **{f"{name}.bias": size[1:] for name, size in found.items()}}

    @classmethod
    def features(cls, logits: Logits, tokens: npt.NDArray[np.int64]) -> Array:
        """The logarithms of the tokens' chances and of the likeliest ones', and the entropy."""
        all_, top, entropy = spread(logits, TOP)
        own = np.take_along_axis(all_, tokens[:, None], -1)
        return np.concatenate([own, top, entropy], -1).astype(np.float32)

    @classmethod
    def odds(cls, head: Mapping[str, Any], x: Any) -> Any:
        """That tokens stand: residual blocks, and two logits."""
        x = x @ head["first"] + head["first.bias"]
        for block in range(BLOCKS):
            x = x + silu(x @ head[f"block{block}"] + head[f"block{block}.bias"])
        out = x @ head["last"] + head["last.bias"]
        return out[:, 1] - out[:, 0]


class _Pace(Pace):
    def __init__(self, of: SpecdecPp, head: Tensors):
        self._of, self._head = of, head
        self._begin()

    def limit(self) -> int:
        return self._of.most

    def more(self, level: Level, logits: Sequence[Logits]) -> bool:
        self._levels += 1
        x = self._of.features(np.stack(logits), level.tokens)
        stand = chance(self._of.odds(self._head, x)).tolist()
        new = [self._stand[parent] * a for parent, a in zip(level.parents, stand, strict=True)]
        self._stand += new
        return self._levels < self._of.least or 1 - max(new) <= self._of.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        self._begin()

    def _begin(self) -> None:
        """A draft: the chance that each node that it went on from stands with those before it; the root does."""
        self._stand, self._levels = [1.0], 0
