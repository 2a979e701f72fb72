"""What scores by leverage share: x_j^T (X^T X + ridge I)^-1 x_j by unrolled iterations of matrix products, and
random projections.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accel.ir.ops.noise import uniform

_ROOT, _POLISH = 22, 6  # iterations
_FLOOR = 1e-6  # of the largest eigenvalue


def leverage(rows: Tensor, ridge: float) -> Tensor:
    """Ridge leverage scores [...,S] of rows [...,S,K].

    The rows are whitened by an inverse square root P of X^T X + I max(ridge, 1e-6 |X^T X|) (coupled Newton-Schulz
    iteration, which converges in float32 at this condition number). P^T (X^T X + ridge I) P is then close to I where
    there are rows, so its inverse (Newton-Schulz) corrects the error of P and the larger ridge.
    """
    matrix = rows.transpose(-2, -1) @ rows
    identity = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    matrix = matrix + (_FLOOR * bound(matrix)).clamp(min=ridge) * identity
    size = bound(matrix)
    y, z = matrix / size, identity.expand(matrix.shape)
    for _ in range(_ROOT):
        step = 1.5 * identity - 0.5 * (z @ y)
        y, z = y @ step, step @ z
    root = z * size**-0.5
    white = rows @ root
    again = white.transpose(-2, -1) @ white + ridge * (root.transpose(-2, -1) @ root)
    inverse = 2 * identity - again
    for _ in range(_POLISH):
        inverse = inverse @ (2 * identity - again @ inverse)
    return ((white @ inverse) * white).sum(-1)


def bound(matrix: Tensor) -> Tensor:
    """At least the largest eigenvalue of each [...,K,K]: [...,1,1]."""
    return matrix.abs().sum(-1).amax(-1)[..., None, None]


def sketch(groups: int, width: int, columns: int, seed: int, like: Tensor) -> Tensor:
    """A Gaussian matrix of each head [G,D,K], of deviation 1/sqrt(K)."""
    sizes = (groups, width, columns)
    numbers = [
        like.new_ones(n, dtype=torch.int64).cumsum(0).view(*(n if i == j else 1 for j in range(3)))
        for i, n in enumerate(sizes)
    ]
    radius = (-2 * uniform(seed, *numbers).clamp(min=1e-9).log()).sqrt()
    found: Tensor = radius * (2 * math.pi * uniform(seed + 1, *numbers)).cos() * columns**-0.5
    return found


def finite(real: Tensor, *tensors: Tensor) -> Tensor:
    """The real slots [B,G,S] whose keys, values [B,G,S,D] are all numbers."""
    for x in tensors:
        real = real & x.isfinite().all(-1)
    return real
