"""ZAYA's compressed convolutional attention (arXiv:2510.04476): q and k of two short convolutions, half of each v of
the token before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.recurrence import causal_conv


def _late(x: Tensor, tokens: int, most: int) -> Tensor:
    """x [B,T,E] of so many tokens before, zeros before the first."""
    taps = torch.zeros(x.shape[-1], most + 1, dtype=x.dtype, device=x.device)
    taps[:, most - tokens] = 1.0
    return causal_conv(x, taps, None, None, None)[0] if tokens else x


def _projection(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    heads = (-1, self.head_dim)
    q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
    # the first convolution's bias goes through the second: it is that of tokens before the first, too
    first, second = self.conv_qk_depthwise, self.conv_qk_grouped
    weight = second.weight.unflatten(0, heads)  # [H,D,D,K]
    bias = torch.einsum("hoik,hi->ho", weight, first.bias.unflatten(0, heads))
    x = causal_conv(torch.cat([q, k], -1), first.weight.squeeze(1), None, None, None)[0]
    mixed, most = second.bias.unflatten(0, heads) + bias, weight.shape[-1] - 1
    for tap in range(most + 1):
        earlier = _late(x, most - tap, most).unflatten(-1, heads)
        mixed = mixed + torch.einsum("bthi,hoi->btho", earlier, weight[..., tap])
    q, k = q.unflatten(-1, heads), k.unflatten(-1, heads)
    groups = self.num_key_value_groups
    mean = (q + k.repeat_interleave(groups, 2)) * 0.5
    query, key = mixed.split([q.shape[2], k.shape[2]], 2)
    value = torch.cat(
        [self.v_proj_current(hidden_states), self.v_proj_delayed(_late(hidden_states, 1, 1))], -1
    )
    return query + mean, key + mean.unflatten(2, (-1, groups)).mean(3), value.unflatten(-1, heads)


FORMS = {"ZayaCCAProjection": _projection}
