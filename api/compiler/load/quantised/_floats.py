"""Weights of few-bit floating-point numbers with scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.ir.codes import Codes
from accel.ir.errors import CaptureError

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of e2m1, whose sign is the highest bit
_ZERO = 128


def exponents(scale: Tensor) -> Tensor:
    """Scales as float32; those in uint8 are powers of two, 127 standing for 1 (e8m0)."""
    if scale.dtype is torch.uint8:
        return torch.exp2(scale.float() - 127)
    return scale.float()


def scaled(name: str, weight: Tensor, scale: Tensor, block: Sequence[int] | None) -> Tensor:
    """weight [...,N,K] times its scale: one, one per row, or one per `block` of rows and columns."""
    value, scale = weight.float(), exponents(scale)
    if scale.numel() == 1:
        return value * scale.reshape(())
    if scale.dim() == weight.dim() - 1:
        scale = scale.unsqueeze(-1)
    rows, columns = weight.shape[-2:]
    if scale.shape[-1] == 1 and scale.shape[-2] == rows:
        return value * scale
    if block is None or [-(-rows // block[0]), -(-columns // block[1])] != list(scale.shape[-2:]):
        raise CaptureError(
            f"{name} is {list(scale.shape)} for a weight {list(weight.shape)} in blocks of {block}: "
            "checkpoint and configuration do not match"
        )
    wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return value * wide[..., :rows, :columns]


def e2m1_codes(packed: Tensor, scales: Tensor, group: int) -> Codes:
    """Bytes of two 4-bit floats [N,K/2], scales [N,G] -> codes of 8 bits that stand for the same numbers."""
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    steps = torch.tensor([_ZERO + n for n in _HALVES] + [_ZERO - n for n in _HALVES])
    q = steps.to(torch.uint8)[both]
    zeros = torch.full(scales.shape, _ZERO, dtype=torch.uint8)
    return Codes(q, scales / 2, zeros, 8, group)
