"""Keyformer (arXiv:2403.09054): H2O with scores of a softmax that has noise and a rising temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.inputs._accumulated import Draw
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class Keyformer(Base):
    """A query gives each key softmax((q k^T + g) / t), g: Gumbel noise times `noise`. t is `start` in a prompt and
    rises to `end` over `rise` generated tokens. `recent`: number of newest tokens to keep.

    The noise is a hash of layer, head, the two positions and `seed`, so equal calls give equal scores. The paper
    keeps 30 % of the budget as `recent`.
    """

    recent: int = option(128, least=0)
    noise: float = option(1.0, least=0)
    start: float = option(1.0, above=0)
    end: float = option(2.0, above=0)
    rise: int = option(100, least=1, most=1 << 20)
    seed: int = option(0, least=0)
    when: ClassVar[str] = "generated"
    small: ClassVar[Mapping[str, Any]] = {"recent": 4}

    def accumulate(  # type: ignore[override]
        self, mass: Tensor, drawn: Draw, steps: Tensor, layer: Tensor
    ) -> Tensor:
        """See Base."""
        progress = (steps / self.rise).clamp(max=1)
        temperature = self.start + (self.end - self.start) * progress
        return mass + drawn(temperature=temperature, layer=layer, noise=self.noise, seed=self.seed)

    def __call__(self, mass: Tensor) -> Tensor:
        return mass
