"""Gated delta networks (arXiv:2412.06464): a short convolution, then the delta rule with decay."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.capture.forms.kernels import unit
from accel.ir.ops.recurrence import causal_conv, linear_attention


def _delta(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Qwen3-Next (one product for q, k, v and the gate) and Qwen3.5 (several)."""
    sizes = [self.key_dim, self.key_dim, self.value_dim]
    if hasattr(self, "in_proj_qkvz"):
        mixed = (self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states))
        q, k, v, gate, b, a = self.fix_query_key_value_ordering(*mixed)
        x = torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), dim=-1)
    else:
        x, b, a = (f(hidden_states) for f in (self.in_proj_qkv, self.in_proj_b, self.in_proj_a))
        gate = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
    x = F.silu(causal_conv(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, None, None)[0])
    q, k, v = x.split(sizes, dim=-1)
    q = unit(q.unflatten(-1, (-1, self.head_k_dim))) * self.head_k_dim**-0.5
    k = unit(k.unflatten(-1, (-1, self.head_k_dim)))
    v = v.unflatten(-1, (-1, self.head_v_dim))  # [B,T,H,D]
    decay = -self.A_log.float().exp() * F.softplus(a + self.dt_bias)
    y = linear_attention(q, k, v, decay, b.sigmoid(), None, None)[0]
    out: Tensor = self.out_proj(self.norm(y, gate).flatten(-2))
    return out


FORMS = {
    "Qwen3NextGatedDeltaNet": _delta,
    "Qwen3_5GatedDeltaNet": _delta,
    "Qwen3_5MoeGatedDeltaNet": _delta,
}
