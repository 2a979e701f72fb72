"""RecurrentGemma (Griffin, arXiv:2402.19427): a short convolution, then a gated linear recurrence."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.recurrence import causal_conv, selective_scan


def _block(
    self: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> Tensor | tuple[Tensor, None]:
    """In later versions blocks give a second value, which is none."""
    conv = self.conv_1d
    x = causal_conv(self.linear_x(input_states), conv.weight.squeeze(1), conv.bias, None, None)[0]
    y = _rg_lru(self.rg_lru, x, position_ids)
    out: Tensor = self.linear_out(y * self.act_fn(self.linear_y(input_states)))
    alone = "cache_position" in signature(type(self).forward).parameters
    return out if alone else (out, None)


def _rg_lru(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """The first token, which follows nothing, is not scaled."""
    heads = x.unflatten(-1, (self.num_attention_heads, 1, self.block_width))  # [B,T,H,1,W]

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(((heads @ weight).squeeze(-2) + bias).flatten(-2))

    kept = gate(self.recurrent_gate_weight, self.recurrent_gate_bias)
    decay = -8.0 * kept * F.softplus(self.recurrent_param)  # a logarithm
    scale = torch.sqrt(1 - torch.exp(2 * decay))
    start = (position_ids[:, :, None] == 0).to(x.dtype)
    scale = start + (1 - start) * scale
    x = x * gate(self.input_gate_weight, self.input_gate_bias) * scale
    one = torch.ones(1, x.shape[-1])
    y: Tensor = selective_scan(x, decay, one, None, None, None, None)[0]
    return y


def _mask(self: Any, attention_mask: None, input_tensor: Tensor, cache_position: Tensor) -> Tensor:
    """[1,1,T,T]: what the module's own forward computes where it is given no cache."""
    hidden = torch.finfo(input_tensor.dtype).min
    later = cache_position[None, :] > cache_position[:, None]
    return torch.where(later, hidden, 0.0)[None, None]


FORMS = {
    "RecurrentGemmaRecurrentBlock": _block,
    "RecurrentGemmaModel._update_causal_mask": _mask,
}
