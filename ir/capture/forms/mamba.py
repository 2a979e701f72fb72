"""Mamba (arXiv:2312.00752) and its kin: a short convolution, then a selective scan per channel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.recurrence import causal_conv, selective_scan


def _mamba(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Mamba, Falcon Mamba (norms without weights) and Jamba (norms with weights)."""
    x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)  # [B,T,E] each
    x = self.act(causal_conv(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, None, None)[0])
    rank, size = self.time_step_rank, self.ssm_state_size
    step, b, c = self.x_proj(x).split([rank, size, size], dim=-1)
    step, b, c = _normed(self, step, b, c)
    step = F.softplus(self.dt_proj(step))
    a = -torch.exp(self.A_log.float()).t().contiguous()
    y = selective_scan(step * x, step, a, b, c, None, None)[0] + x * self.D
    out: Tensor = self.out_proj(y * self.act(gate))
    return out


def _normed(self: Any, step: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if hasattr(self, "dt_layernorm"):
        return self.dt_layernorm(step), self.b_layernorm(b), self.c_layernorm(c)
    if hasattr(self, "rms_eps"):
        return _unit(step, self.rms_eps), _unit(b, self.rms_eps), _unit(c, self.rms_eps)
    return step, b, c


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _zamba(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Zamba: heads of channels, each with its own steps, b and c."""
    x, gate = self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)  # [B,T,E] each
    x = self.act(causal_conv(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, None, None)[0])
    rank, size = self.time_step_rank, self.ssm_state_size
    heads = []
    for i, part in enumerate(x.chunk(self.n_mamba_heads, dim=-1)):
        step, b, c = F.linear(part, self.x_proj_weight[i]).split([rank, size, size], dim=-1)
        step = F.softplus(F.linear(step, self.dt_proj_weight[i], self.dt_proj_bias[i]))
        a = -torch.exp(self.A_log[i].float()).t().contiguous()
        heads.append(selective_scan(step * part, step, a, b, c, None, None)[0] + part * self.D[i])
    out: Tensor = self.out_proj(torch.cat(heads, dim=-1) * self.act(gate))
    return out


FORMS = {
    "MambaMixer": _mamba,
    "FalconMambaMixer": _mamba,
    "JambaMambaMixer": _mamba,
    "ZambaMambaMixer": _zamba,
}
