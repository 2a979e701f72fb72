"""How much attention each slot draws: what scores of eviction add up."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.ir.ops.attention import Operands, attention, weights
from accel.ir.ops.op import Op


def _attention_mass(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    probs = weights(x)[0]  # [B,H,T,S]
    probs = probs * (x.q_pos >= 0)[:, None, :, None]
    drawn: Tensor = probs.sum(2).unflatten(1, (x.k.shape[1], -1)).sum(2)
    return drawn


def _shape(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    slots = x.k.shape[2] + (0 if x.kept_k is None else x.kept_k.shape[2])
    return x.k.new_empty((x.k.shape[0], x.k.shape[1], slots))


# The operands of `attention`. -> [B,G,P+S]: the weights of each slot, summed over the queries (padding
# gives none) and over the heads of a group.
attention_mass = Op(
    "attention_mass",
    attention.schema,
    reference=_attention_mass,
    shape=_shape,
)
