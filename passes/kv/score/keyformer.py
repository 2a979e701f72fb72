"""Keyformer (arXiv:2403.09054): H2O with scores of a softmax that has noise and a rising temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.passes.kv.inputs._accumulated import Draw
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class Keyformer(Base):
    """A query gives each key softmax((q k^T + g) / t), g: Gumbel noise times `noise`. t is `start` in a prompt and
    rises to `end` over `rise` generated tokens. `recent`: number of newest tokens to keep.

    The noise is a hash of layer, head, the two positions and `seed`, so equal calls give equal scores. The paper
    keeps 30 % of the budget as `recent`.
    """

    recent: int = 128
    noise: float = 1.0
    start: float = 1.0
    end: float = 2.0
    rise: int = count(100, most=1 << 20)
    seed: int = 0
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"recent": 4}

    def __post_init__(self) -> None:
        if min(self.recent, self.seed) < 0 or self.rise < 1:
            raise RecipeError(
                f"kv.score.keyformer: recent is {self.recent}, seed {self.seed} and rise {self.rise}; give at least "
                "0, 0 and 1"
            )
        if not (0 < self.start < float("inf") and 0 < self.end < float("inf")):
            raise RecipeError(
                f"kv.score.keyformer: start is {self.start} and end {self.end}; give temperatures above 0"
            )
        if not 0 <= self.noise < float("inf"):
            raise RecipeError(
                f"kv.score.keyformer: noise is {self.noise}; give 0 or more (1: as the paper)"
            )

    def accumulate(  # type: ignore[override]
        self, mass: Tensor, drawn: Draw, steps: Tensor, layer: Tensor
    ) -> Tensor:
        """See Base."""
        progress = (steps / self.rise).clamp(max=1)
        temperature = self.start + (self.end - self.start) * progress
        return mass + drawn(temperature=temperature, layer=layer, noise=self.noise, seed=self.seed)

    def __call__(self, mass: Tensor) -> Tensor:
        return mass
