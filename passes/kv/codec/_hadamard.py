"""Hadamard rotations of neighbouring numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, size: int) -> Tensor:
    """Each `size` numbers of x [...,n size] times a Hadamard matrix of -1 and 1, which is `size` times its own inverse;
    as two products, since the matrix is the Kronecker product of two smaller ones.
    """
    power = size.bit_length() - 1
    one, two = (_hadamard(1 << n, x) for n in (power // 2, power - power // 2))
    parts = x.unflatten(-1, [-1, one.shape[0], two.shape[0]])
    # Matrices on the right and flat on the left: ONNX Runtime multiplies others by nothing where there are no blocks.
    aside = (parts @ two).mT.flatten(-3, -2)  # [...,n two,one]
    back: Tensor = (aside @ one).unflatten(-2, [-1, two.shape[0]]).mT.flatten(-3)
    return back


def _hadamard(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix [size,size]: -1 where the numbers of a row and a column share an odd number of bits."""
    at = torch.arange(size, device=like.device)
    bits = 2 ** torch.arange(size.bit_length(), device=like.device)
    both = ((at[:, None] & at)[..., None] // bits % 2).sum(-1)
    return (1 - 2 * (both % 2)).to(like.dtype)
