"""Mamba-2 (arXiv:2405.21060) and its kin: a short convolution, then one decay per head and token."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.ops.recurrence import causal_conv, linear_attention


def _ssd(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Mamba-2, Bamba, Falcon-H1 (with multipliers), Granite hybrids and Zamba2."""
    x = hidden_states
    if hasattr(self, "ssm_in_multiplier"):
        x = x * self.ssm_in_multiplier
    x = self.in_proj(x)
    if hasattr(self, "mup_vector"):
        x = x * self.mup_vector
    gate, x, step = x.split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
    x = self.act(causal_conv(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, None, None)[0])
    shared = self.n_groups * self.ssm_state_size
    x, k, q = x.split([self.intermediate_size, shared, shared], dim=-1)
    x = x.unflatten(-1, (self.num_heads, self.head_dim))  # [B,T,H,D]
    q, k = (z.unflatten(-1, (self.n_groups, self.ssm_state_size)) for z in (q, k))
    step = _clamped(self, F.softplus(step + self.dt_bias))  # [B,T,H]
    decay = -torch.exp(self.A_log.float()) * step
    y = linear_attention(q, k, x * step.unsqueeze(-1), decay, None, None, None)[0]
    y = (y + x * self.D.unsqueeze(-1)).flatten(-2)
    norm = getattr(self, "norm", None)
    plain = norm is None or isinstance(norm, nn.Identity)
    out: Tensor = self.out_proj(y * F.silu(gate) if plain else _gated_norm(norm, y, gate))
    return out


def _clamped(self: Any, step: Tensor) -> Tensor:
    """Steps within the configured limits; Zamba2 may know only the lower one."""
    if not hasattr(self, "time_step_limit"):
        return step.clamp(min=self.time_step_min)
    low, high = self.time_step_limit
    return step.clamp(low, None if math.isinf(high) else high)


def _gated_norm(norm: Any, y: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm in groups of channels, gated before it or after it."""
    width = y.shape[-1]
    size = getattr(norm, "group_size", width // getattr(norm, "n_groups", 1))
    late = getattr(norm, "norm_before_gate", False)
    y = y if late else y * F.silu(gate)
    if size == width:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    else:
        y = y.unflatten(-1, (width // size, size))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        y = y.flatten(-2)
    y = norm.weight * y
    return y * F.silu(gate) if late else y


FORMS = {
    "Mamba2Mixer": _ssd,
    "BambaMixer": _ssd,
    "FalconH1Mixer": _ssd,
    "GraniteMoeHybridMambaLayer": _ssd,
    "Zamba2MambaMixer": _ssd,
}
