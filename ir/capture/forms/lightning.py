"""MiniMax lightning attention (arXiv:2401.04658): linear attention with a fixed decay per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.recurrence import linear_attention


def _lightning(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    heads = qkv.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
    q, k, v = heads.split(self.head_dim, dim=-1)
    decay = -self.slope_rate.reshape(1, 1, -1)
    y = self.norm(linear_attention(q, k, v, decay, None, None, None)[0].flatten(-2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * y), None


FORMS = {"MiniMaxLightningAttention": _lightning}
