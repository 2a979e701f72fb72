"""How much attention each slot draws from each query: what scores of eviction accumulate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops import ragged
from accel.ir.ops.attention import Operands, attention, weights
from accel.ir.ops.op import Op


def _attention_weights(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    probs = weights(x)[0]  # [B,H,T,S]
    if x.kept_counts is not None and x.kept_pos is not None:
        probs = _in_slots(probs, x.kept_counts, x.kept_pos.shape[2], x.k.shape[2])
    return probs * (x.q_pos >= 0)[:, None, :, None]


def _in_slots(probs: Tensor, counts: Tensor, kept: int, recent: int) -> Tensor:
    """probs [B,H,T,P+S] of the kept slots of each head -> of all heads' [B,H,T,M+S], 0 for those of others."""
    slots = torch.arange(kept, device=probs.device)
    mine = ragged.owned(counts, slots)  # [B,G,M]
    at = slots - (counts.cumsum(1) - counts)[..., None]
    repeat = probs.shape[1] // counts.shape[1]
    at, mine = (
        x.repeat_interleave(repeat, 1)[:, :, None].expand(-1, -1, probs.shape[2], -1)
        for x in (at.masked_fill(~mine, 0), mine)
    )
    old = probs[..., : probs.shape[3] - recent].gather(3, at).masked_fill(~mine, 0)
    return torch.cat((old, probs[..., probs.shape[3] - recent :]), dim=3)


def _shape(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    slots = x.k.shape[2] + (0 if x.kept_k is None else x.kept_k.shape[2])
    return x.k.new_empty((*x.q.shape[:3], slots))


# The operands of `attention`. -> [B,H,T,P+S]: the weight of each slot for each query; padding gives 0. Of kept
# slots of unequal numbers [B,H,T,M+S]: those of other heads give 0.
attention_weights = Op(
    "attention_weights",
    attention.schema,
    reference=_attention_weights,
    shape=_shape,
)
