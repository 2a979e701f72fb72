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


def check_scale(name: str, weight: Tensor, scale: Tensor, block: Sequence[int] | None) -> None:
    """Raise CaptureError where a scale of a weight [...,N,K] is not one number, one per row, or one per `block` of rows
    and columns.
    """
    if weight.dim() >= 2 and _per(weight, scale, block) is not None:
        return
    raise CaptureError(
        f"{name} is {list(scale.shape)} for a weight {list(weight.shape)} in blocks of {block}: "
        "checkpoint and configuration do not match"
    )


def _per(weight: Tensor, scale: Tensor, block: Sequence[int] | None) -> tuple[int, int] | None:
    """The rows and columns that share a number of a scale; None where it does not belong to the weight."""
    *lead, rows, columns = weight.shape
    if scale.numel() == 1:
        return rows, columns
    if list(scale.shape) in ([*lead, rows], [*lead, rows, 1]):
        return 1, columns
    if not isinstance(block, Sequence) or [type(size) for size in block] != [int, int]:
        return None
    high, wide = block
    if min(high, wide) < 1 or list(scale.shape) != [*lead, -(-rows // high), -(-columns // wide)]:
        return None
    return high, wide


def scaled(weight: Tensor, scale: Tensor, block: Sequence[int] | None) -> Tensor:
    """weight [...,N,K] times its scale, which `check_scale` found to belong to it."""
    value, scale = weight.float(), exponents(scale)
    if scale.numel() == 1:
        return value * scale.reshape(())
    per = _per(weight, scale, block)
    assert per is not None  # it was checked
    *_, rows, columns = weight.shape
    if scale.dim() == weight.dim() - 1:
        scale = scale.unsqueeze(-1)
    wide = scale.repeat_interleave(per[0], -2)[..., :rows, :]
    return value * wide.repeat_interleave(per[1], -1)[..., :columns]


def e2m1_codes(packed: Tensor, scales: Tensor, group: int) -> Codes:
    """Bytes of two 4-bit floats [N,K/2], scales [N,G] -> codes of 8 bits that stand for the same numbers."""
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    steps = torch.tensor([_ZERO + n for n in _HALVES] + [_ZERO - n for n in _HALVES])
    q = steps.to(torch.uint8)[both]
    zeros = torch.full(scales.shape, _ZERO, dtype=torch.uint8)
    return Codes(q, scales / 2, zeros, 8, group)
