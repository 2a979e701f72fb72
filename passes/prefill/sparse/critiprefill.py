"""CritiPrefill (arXiv:2409.12490): the queries of a segment share the key blocks that they attend to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.attention import Form
from accel.passes.prefill.sparse import Base


@dataclass(frozen=True)
class CritiPrefill(Base):
    """The score of a block is the product of the segment's query midpoint (of the channel-wise minimum and
    maximum) with the
    block's maximum or minimum keys, whichever is larger, averaged over the heads of a group. Blocks are selected by the
    softmax of the scores, with a fraction `fusion` from the previous layer.

    The paper's code omits the attention scale (1/sqrt(D)); without it the softmax of most blocks is exactly 0, and the
    selection among them is arbitrary.
    """

    fusion: float = option(0.25, least=0, below=1)

    fuses: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"segment": 8, "block": 4, "budget": 8, "threshold": 8}

    def score(self, queries: Tensor, high: Tensor, low: Tensor, form: Form) -> Tensor:
        middle = (queries.amax(2) + queries.amin(2)) / 2  # [B,H,D]
        groups = middle.unflatten(1, (high.shape[1], -1)).float()  # [B,G,R,D]
        best, worst = (groups @ x.float().transpose(-1, -2) for x in (high, low))  # [B,G,R,NB]
        return form.logits(torch.maximum(best, worst)).mean(2)

    def fuse(self, weights: Tensor, before: Tensor) -> Tensor:
        return self.fusion * before + (1 - self.fusion) * weights
