"""Rounding with error feedback: GPTQ (arXiv:2210.17323).

Columns are rounded one after another, and each one's error is made good by the columns still to come,
as far as the inputs seen are correlated. The steps are set beforehand, so that the columns may be taken
in any order: the largest inputs first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from accel.ir.errors import PassError
from accel.ir.ops.quantized import pack, pack_blocks, zero_bits
from accel.passes.weights._blocks import Packed, in_blocks, steps

_COLUMNS = 128  # rounded between two updates of the rest
_ROWS = 4096  # of a weight at a time


Steps = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]  # as `steps` has them


def round_with_feedback(
    weight: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    block: int,
    symmetric: bool,
    choose: Steps = steps,
) -> Packed:
    """A weight [N,K] in few bits, so that its products with inputs like those seen stay the same.

    order, factor: `feedback_of` the inputs. choose: the steps of blocks [N,blocks,block].
    """
    how = (order, factor, bits, block, symmetric, choose)
    parts = [_rounded(rows, *how) for rows in weight.float().split(_ROWS)]
    q, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
    return Packed(q, scales, None if symmetric else zeros, bits, block)


def feedback_of(inputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Of inputs [tokens,K]: the order of the columns [K], and the upper U [K,K] in it such that UᵀU is
    the inverse of the inputs' second moments, their diagonal raised by a share of its mean.
    """
    moments = inputs.t() @ inputs
    mean = float(moments.diagonal().mean()) or 1.0
    if not math.isfinite(mean):
        raise PassError("a product's input on the calibration text is not finite: give other text")
    order = moments.diagonal().argsort(descending=True, stable=True)
    last = order.flip(
        0
    )  # the Cholesky factor from the end, inverted, is the inverse's from the front
    moments = moments[last][:, last]
    moments.diagonal().add_(damping * mean)
    lower, failed = torch.linalg.cholesky_ex(moments)
    while failed:
        moments.diagonal().add_(9 * damping * mean)
        damping *= 10
        lower, failed = torch.linalg.cholesky_ex(moments)
    unit = torch.eye(len(order), out=moments)
    return order, torch.linalg.solve_triangular(lower, unit, upper=False).flip(0, 1)


def _rounded(
    weight: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    block: int,
    symmetric: bool,
    choose: Steps,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, scales [N,blocks] and packed zero points of some rows."""
    scales, zeros = (part.squeeze(-1) for part in choose(in_blocks(weight, block), bits, symmetric))
    rest = weight.t()[order].contiguous()  # [K,N]: a column is a row here, and lies in one piece
    codes = torch.empty_like(rest, dtype=torch.uint8)
    columns = [
        (scales[:, i].contiguous(), zeros[:, i].contiguous()) for i in range(scales.shape[1])
    ]
    top = 2**bits - 1
    for start in range(0, len(order), _COLUMNS):
        end = min(start + _COLUMNS, len(order))
        errors = torch.empty(end - start, weight.shape[0])
        for i in range(start, end):
            scale, zero = columns[int(order[i]) // block]
            code = (rest[i] / scale + zero).round_().clamp_(0, top)
            codes[i] = code
            error = (rest[i] - (code - zero) * scale) / factor[i, i]
            rest[i:end].addr_(factor[i, i:end], error, alpha=-1)
            errors[i - start] = error
        rest[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    whole = zeros.to(torch.uint8).repeat_interleave(block, dim=1)  # zero where a block is padded
    whole[:, order] = codes.t()
    codes = pack_blocks(whole.unflatten(1, (-1, block)), bits)
    return codes, scales, pack(zeros, zero_bits(bits))
