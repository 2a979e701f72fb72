"""RWKV-4 (arXiv:2305.13048): each token mixed with the one before it, then a weighted mean of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.recurrence import causal_conv, wkv


def _mixed(hidden: Tensor, *shares: Tensor) -> list[Tensor]:
    """share · token + (1 - share) · the token before, for each share."""
    taps = torch.tensor([[1.0, 0.0]]).repeat(hidden.shape[-1], 1)
    before = causal_conv(hidden, taps, None, None, None)[0]
    return [hidden * share + before * (1 - share) for share in shares]


def _time(self: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    k, v, r = _mixed(hidden, self.time_mix_key, self.time_mix_value, self.time_mix_receptance)
    decay = -torch.exp(self.time_decay)
    y = wkv(self.key(k), self.value(v), decay, self.time_first, None, None)[0]
    return self.output(torch.sigmoid(self.receptance(r)) * y), None


def _channel(self: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    k, r = _mixed(hidden, self.time_mix_key, self.time_mix_receptance)
    value = self.value(torch.square(torch.relu(self.key(k))))
    return torch.sigmoid(self.receptance(r)) * value, None


FORMS = {"RwkvSelfAttention": _time, "RwkvFeedForward": _channel}
