"""LFM2: a short convolution between two gates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.ir.ops.recurrence import causal_conv


def _short_conv(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)  # [B,T,E] each
    y = causal_conv(before * x, self.conv.weight.squeeze(1), self.conv.bias, None, None)[0]
    out: Tensor = self.out_proj(after * y)
    return out


FORMS = {"Lfm2ShortConv": _short_conv, "Lfm2MoeShortConv": _short_conv}
