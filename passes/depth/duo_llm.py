"""Duo-LLM (arXiv:2410.10846): beside each MLP stands a small one, and routers learn which of the two a token takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.ir.axis import option
from accel.passes.depth._routed import MLP, Routed
from accel.passes.trained import INNER

HALF = 0.5  # the score from which on a token takes the big MLP, in training
_COINS = 0.6  # the share of the training in which tokens draw, and the routers do not learn
_SHARPEST = 10.0  # what scores are multiplied by at the end of training, before the sigmoid


@dataclass(frozen=True)
class DuoLlm(Routed):
    """A token takes the MLP of a layer where its score, the sigmoid of one linear map of the residual stream, is at
    least `threshold`, else the small MLP of this layer: 0 is the model as it is. Small MLPs are gated (SiLU) and as
    wide as they were trained (`inner` of `accel-compile train`).

    Training begins with fair coins for each token and layer, by which the small MLPs learn; then routers learn, more
    and more sharply, so that tokens take the share `share` of the big ones over all layers.

    The paper trains both kinds of MLPs from the beginning. Here the model stays as it is, which the paper finds worse.
    """

    threshold: float = option(HALF, least=0, most=1)
    share: float = option(HALF, above=0, below=1)

    key: ClassVar[str] = "duo-llm"
    lacks = "training of big and small MLPs together, and the third choice: no MLP at all"

    @property
    def targets(self) -> tuple[str, ...]:
        """See Learns."""
        return (MLP,)

    @property
    def limit(self) -> float:
        """See Routed."""
        return 1 - self.threshold

    def router(self, width: int) -> dict[str, tuple[int, ...]]:
        """See Learns. w, bias: of the score. gate, up, down: of the small MLP."""
        small = {"gate": (width, INNER), "up": (width, INNER), "down": (INNER, width)}
        return {"w": (width,), "bias": (1,), **small}

    def spare(self, x: Tensor, w: Tensor, bias: Tensor, **small: Tensor) -> Tensor:  # type: ignore[override]
        """See Routed."""
        return torch.sigmoid(-(x @ w + bias))

    def instead(  # type: ignore[override]
        self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, **score: Tensor
    ) -> Tensor:
        """See Learns: what the small MLP adds."""
        return (F.silu(x @ gate) * (x @ up)) @ down

    # Training (api/compiler/train/runs/routers.py)

    def begin(self, width: int, inner: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Small MLPs that add nothing, and routers that know no difference."""
        gate, up = (torch.randn(width, inner, generator=generator) * width**-0.5 for _ in range(2))
        score = {"w": torch.zeros(width), "bias": torch.zeros(1)}
        return {**score, "gate": gate, "up": up, "down": torch.zeros(inner, width)}

    def soft(  # type: ignore[override]
        self, x: Tensor, progress: float, w: Tensor, bias: Tensor, **small: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Learns. While coins are thrown, no router has a gradient."""
        if progress < _COINS:
            big = (torch.rand(x.shape[:-1]) < HALF).float()
        else:
            over = (progress - _COINS) / (1 - _COINS)
            big = torch.sigmoid(_SHARPEST**over * (x @ w + bias))
        return big[..., None], big.mean()

    def price(self, mean: Tensor) -> Tensor:
        """The square of how far the share of big ones is from `share`."""
        return (mean - self.share).square()
