"""CRITIC (arXiv:2504.01281): a mix of the attention that a token received and the entropy of its own attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class Critic(Base):
    """Each term is scaled to 0..1 over the tokens of a row, and weighs `attention` and `entropy`. All heads of a layer
    keep the same tokens. `recent`: number of newest tokens to keep.

    The paper's third term, the gradient of a loss, needs a backward pass and is left out. Its attention term is
    printed as a sum over the keys of a query, which is constant; the sum over the queries is meant.
    """

    attention: float = option(0.5, least=0)
    entropy: float = option(0.5, least=0)
    recent: int = option(128, least=0)
    lacks = "the term of a loss's gradient"
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"recent": 4}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.attention + self.entropy < math.inf:
            raise RecipeError(
                f"{self.full_name}: attention is {self.attention} and entropy {self.entropy}; give weights, one of "
                "them above 0"
            )

    def __call__(self, mass: Tensor, entropy: Tensor, positions: Tensor) -> Tensor:
        there = (positions >= 0) & mass.isfinite() & entropy.isfinite()
        score = self.attention * _scaled(mass, there) + self.entropy * _scaled(entropy, there)
        return torch.where(there, score, -1.0)


def _scaled(x: Tensor, present: Tensor) -> Tensor:
    """The mean over the heads [B,G,S] -> [B,1,S], as a share of its range over the slots that hold something."""
    real = present.any(1, keepdim=True)
    mean = torch.where(present, x, 0.0).sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp(
        min=1
    )
    far = torch.finfo(x.dtype).max
    least = mean.masked_fill(~real, far).amin(2, keepdim=True)
    most = mean.masked_fill(~real, -far).amax(2, keepdim=True)
    return ((mean - least) / (most - least).clamp(min=1e-30)).clamp(0, 1).expand(x.shape)
