"""RWKV-7 (arXiv:2503.14456): each token mixed with the one before it, then a matrix with a diagonal and low-rank
transition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.recurrence import causal_conv, dplr_attention


def _shift(self: Any, x: Tensor) -> Tensor:
    taps = torch.tensor([[1.0, 0.0]]).repeat(x.shape[-1], 1)
    return causal_conv(x, taps, None, None, None)[0]  # type: ignore[no-any-return]


def _state(self: Any, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return dplr_attention(r, k, v, w, a, b, None, None)[0]  # type: ignore[no-any-return]


FORMS = {"Shift": _shift, "DplrState": _state}
