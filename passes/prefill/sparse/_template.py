"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.ops.attention import Form
from accel.passes.prefill.sparse import Base


@dataclass(frozen=True)
class Template(Base):
    """What a block of keys scores: here, the mean query times the middle of the block."""

    small: ClassVar[Mapping[str, Any]] = {"segment": 8, "block": 4, "budget": 8, "threshold": 8}

    def score(self, queries: Tensor, high: Tensor, low: Tensor, form: Form) -> Tensor:
        mean = queries.float().mean(2)  # [B,H,D]
        groups = mean.unflatten(1, (high.shape[1], -1))  # [B,G,R,D]
        middle = (high.float() + low.float()) / 2  # [B,G,NB,D]
        return form.logits(groups @ middle.transpose(-1, -2)).sum(2)
