"""Value merging (Token Merging, arXiv:2210.09461; D2O, arXiv:2406.13035): the value of an evicted token is added to
that of the kept token with the most similar key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.keep import Base


@dataclass(frozen=True)
class ValueMerge(Base):
    """`threshold`: minimum cosine similarity of the two keys. Keys are unchanged."""

    threshold: float = option(0.0, least=-1, most=1)

    def __call__(
        self, keys: Tensor, values: Tensor, positions: Tensor, chosen: Tensor, real: Tensor
    ) -> Tensor:
        index = chosen[..., None]
        kept = values.gather(2, index.expand(-1, -1, -1, values.shape[3]))
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        targets = unit.gather(2, index.expand(-1, -1, -1, keys.shape[3]))  # [B,G,N,D]
        cosine = unit @ targets.transpose(-1, -2)  # [B,G,S,N]
        cosine = cosine.masked_fill(~real[:, :, None], -2.0)
        nearest = cosine.argmax(-1)  # [B,G,S]
        likeness = cosine.gather(3, nearest[..., None])[..., 0]
        gone = torch.ones_like(likeness).scatter(2, chosen, (~real).to(likeness.dtype))
        gone = (gone > 0) & (positions >= 0) & (likeness >= self.threshold)
        size, other = values.norm(dim=-1), kept.norm(dim=-1)
        share = size / (size + other.gather(2, nearest) + 1e-6)
        weight = torch.where(
            gone, likeness.clamp(min=0) * share, torch.zeros_like(share)
        )  # [B,G,S]
        into = nearest[..., None].expand(-1, -1, -1, values.shape[3])
        total = kept.scatter_add(2, into, weight[..., None] * values)
        weights = torch.ones_like(other).scatter_add(2, nearest, weight)
        return total / weights[..., None]
