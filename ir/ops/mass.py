"""How much attention each slot draws: what scores of eviction add up."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.ir.op import Op
from accel.ir.ops.attention import attention, weights


def _attention_mass(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, *rest: Any, **more: Any) -> Tensor:
    probs = weights(q, k, v, q_pos, *rest, **more)[0]  # [B,H,T,S]
    probs = probs * (q_pos >= 0)[:, None, :, None]
    drawn: Tensor = probs.sum(2).unflatten(1, (k.shape[1], -1)).sum(2)
    return drawn


def _shape(q: Tensor, k: Tensor, *rest: Any, **more: Any) -> Tensor:
    kept = more.get("kept_k", rest[10] if len(rest) > 10 else None)
    slots = k.shape[2] + (0 if kept is None else kept.shape[2])
    return k.new_empty((k.shape[0], k.shape[1], slots))


# The operands of `attention`. -> [B,G,P+S]: the weights of each slot, summed over the queries (padding
# gives none) and over the heads of a group.
attention_mass = Op(
    "attention_mass",
    attention.schema,
    reference=_attention_mass,
    shape=_shape,
)
