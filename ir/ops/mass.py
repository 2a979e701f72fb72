"""How much attention each slot draws from each query: what scores of eviction accumulate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.ir.ops.attention import Operands, attention, weights
from accel.ir.ops.op import Op


def _attention_weights(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    probs = weights(x)[0]  # [B,H,T,S]
    return probs * (x.q_pos >= 0)[:, None, :, None]


def _shape(*operands: Any, **more: Any) -> Tensor:
    x = Operands[Tensor](*operands, **more)
    slots = x.k.shape[2] + (0 if x.kept_k is None else x.kept_k.shape[2])
    return x.k.new_empty((*x.q.shape[:3], slots))


# The operands of `attention`. -> [B,H,T,P+S]: the weight of each slot for each query; padding gives 0.
attention_weights = Op(
    "attention_weights",
    attention.schema,
    reference=_attention_weights,
    shape=_shape,
)
