"""Rotary position embedding (arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op


def _rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[1]
    c, s = (t[positions.clamp(min=0)].unsqueeze(1).to(x.dtype) for t in (cos, sin))  # [B,1,T,half]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned, rest), dim=-1)


# x [B,H,T,D]; positions [B,T] (-1 at padding); cos, sin [M, R/2] by position: the first R <= D
# channels turn, in pairs (i, i + R/2), or (2i, 2i + 1) where interleaved.
rope = Op(
    "rope",
    "(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    reference=_rope,
    shape=lambda x, positions, cos, sin, interleaved: x.new_empty(x.shape),
)
