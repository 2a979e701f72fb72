"""The directions that matrices are largest in, by products alone, so that every target finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.noise import uniform

_LEAST = 1e-5  # of a column's length: what is left of less is rounding
_SEED = 2403
_SQUARINGS = 10  # directions of a size 0.997 times the next larger one are told apart


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


def largest(products: Tensor, count: int) -> Tensor:
    """The eigenvectors [N,P,D,count] of symmetric products [N,P,D,D] without negative eigenvalues, the largest first:
    each is a column of a high power of what those before it leave. 0 where nothing is left.
    """
    left, found = _scaled(products), list[Tensor]()
    start = any_columns(left, count)
    for i in range(count):
        power = left
        for _ in range(_SQUARINGS):
            power = _scaled(power @ power)
        column = _unit(power @ start[..., i : i + 1], 0.0)
        for _ in range(2 if found else 0):
            before = torch.cat(found, -1)
            column = _unit(column - before @ (before.mT @ column), _LEAST)
        found.append(column)
        if i + 1 < count:
            left = left - column @ (column.mT @ left)
            left = left - (left @ column) @ column.mT
    return torch.cat(found, -1)


def _scaled(x: Tensor) -> Tensor:
    """Matrices [N,P,D,D] whose largest number is 1."""
    return x / x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)


def _unit(column: Tensor, least: float) -> Tensor:
    """A column [N,P,n,1] of length 1; 0 where it is no longer than `least`."""
    size = column.square().sum(-2, keepdim=True).sqrt()
    return torch.where(size > least, column / size.clamp(min=1e-30), column * 0)
