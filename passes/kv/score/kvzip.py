"""KVzip (arXiv:2505.23416): a token is worth the most attention that it draws while its prompt is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class KVzip(Base):
    """What stays serves any later question, since none was asked. `sinks`: number of first tokens to keep.

    The repeat attends to the whole cache; the paper lets each chunk of 2048 tokens attend to its own original and the
    sinks alone, which is the same for shorter prompts. Its instruction to repeat is left out. A prompt must leave 16
    positions free.
    """

    sinks: int = option(4, least=0)
    lacks = "repeats in chunks, for prompts of more than 2048 tokens"
    repeats: ClassVar[bool] = True  # type: ignore[misc]

    def accumulate(self, mass: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """See Base. The maximum over queries and the heads of a group."""
        return torch.maximum(mass, weights.amax((2, 3)))

    def __call__(self, mass: Tensor) -> Tensor:
        return mass
