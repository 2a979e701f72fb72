"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accel.passes.kv.refine import Base


@dataclass(frozen=True)
class Template(Base):
    """What becomes of the scores: here, times the norm of the values."""

    def __call__(self, scores: Tensor, values: Tensor) -> Tensor:
        least = scores.amin(2, keepdim=True)
        worth: Tensor = (scores - least) * values.norm(dim=-1)
        return worth
