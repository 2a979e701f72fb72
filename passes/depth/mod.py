"""Router-Tuning (arXiv:2410.13184): of a model that stays as it is, routers learn which tokens need a branch; as in
Mixture-of-Depths (arXiv:2404.02258), the others pass it by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.depth._routed import ATTN, TARGETS, Routed

HALF = 0.5  # the score from which on a token takes a branch, in training


@dataclass(frozen=True)
class Mod(Routed):
    """A token takes a branch where its score, the sigmoid of one linear map of the residual stream, is at least
    `threshold`: 0 is the model as it is. `target`: which branch of each layer has a router, attention or the MLP.
    Keys and values are those of all tokens.

    Routers are trained so that tokens take the share `share` of the branches.
    """

    threshold: float = option(HALF, least=0, most=1)
    target: str = option(ATTN, one_of=TARGETS)
    share: float = option(0.75, above=0, most=1)

    key: ClassVar[str] = "mod"
    lacks = "models that were trained with experts' choice of tokens, and routers by sequence or of whole layers"

    @property
    def targets(self) -> tuple[str, ...]:
        """See Learns."""
        return (self.target,)

    @property
    def limit(self) -> float:
        """See Routed."""
        return 1 - self.threshold

    def router(self, width: int) -> dict[str, tuple[int, ...]]:
        """See Learns."""
        return {"w": (width,)}

    def spare(self, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        """See Routed."""
        return torch.sigmoid(-(x @ w))

    # Training (api/compiler/train/runs/routers.py): a token takes or leaves a branch, its score has the gradient.

    def begin(self, width: int, inner: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Routers by which all tokens take all branches, just so."""
        return {"w": torch.zeros(width)}

    def soft(self, x: Tensor, progress: float, w: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See Learns."""
        score = torch.sigmoid(x @ w)
        taken = (score >= HALF).float() + score - score.detach()
        return taken[..., None], taken.mean()

    def price(self, mean: Tensor) -> Tensor:
        """How far the share of branches that are taken is above `share`."""
        return (mean - self.share).relu()
