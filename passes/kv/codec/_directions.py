"""The directions that matrices are largest in, by products alone, so that every target finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.noise import uniform

_LEAST = 1e-5  # of a column's length: what is left of less is rounding
_SEED = 2403


def any_columns(x: Tensor, count: int) -> Tensor:
    """As many columns [N,P,D,count] that a power iteration of x [N,P,R,D] begins with, always the same."""
    channel = torch.arange(x.shape[-1], device=x.device)[:, None]
    start = uniform(_SEED, channel, torch.arange(count, device=x.device)) - 0.5
    return start.expand(*x.shape[:2], -1, -1)


def orthonormal(columns: Tensor, again: bool) -> Tensor:
    """Columns of [N,P,n,r] by Gram-Schmidt, `again`: twice each; one that depends on those before becomes 0."""
    found: list[Tensor] = []
    for i in range(columns.shape[-1]):
        column = one = _unit(columns[..., i : i + 1], 0.0)
        for _ in range((2 if again else 1) if found else 0):
            before = torch.cat(found, -1)
            one = one - before @ (before.mT @ one)
        found.append(_unit(one, _LEAST) if found else column)
    return torch.cat(found, -1)


def _unit(column: Tensor, least: float) -> Tensor:
    """A column [N,P,n,1] of length 1; 0 where it is no longer than `least`."""
    size = column.square().sum(-2, keepdim=True).sqrt()
    return torch.where(size > least, column / size.clamp(min=1e-30), column * 0)
