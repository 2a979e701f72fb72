"""Steps with which a block of weights errs least where its columns are multiplied with large inputs.

As in the importance matrices of llama.cpp, the squared error of a column counts as much as the mean
square of its inputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from accel.passes.weights._blocks import (
    Packed,
    encode,
    in_blocks,
    round_to_nearest,
    rounded_scales,
    steps,
)
from accel.passes.weights._feedback import Steps, feedback_of, round_with_feedback

_LONGER = (0.65, 0.72, 0.79, 0.86, 0.93)  # of the step that reaches the largest value
_FITS = 2  # times that steps are fitted to the codes that they gave
_SMALLEST = 1e-3  # what a column counts at least, as a share of all columns' mean


def importance(inputs: Tensor) -> Tensor:
    """What the columns of a weight count [K], for inputs [tokens,K]."""
    squares = inputs.square().mean(0)
    return squares + (_SMALLEST * squares.mean() or 1.0)


def searched_steps(
    counts: Tensor, blocks: Tensor, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Scales and the codes of zero [N,blocks,1] for blocks [N,blocks,block], whose columns count [blocks,block]."""

    def harm(scales: Tensor, zeros: Tensor) -> Tensor:
        off = (encode(blocks, scales, zeros, bits) - zeros) * scales - blocks
        return (off.square_() * counts).sum(-1, keepdim=True)

    scales, zeros = steps(blocks, bits, symmetric)
    least = harm(scales, zeros)

    def offer(scale: Tensor, zero: Tensor) -> None:
        nonlocal least, scales, zeros
        found = harm(scale, zero)
        better = found < least
        least = torch.where(better, found, least)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)

    for longer in _LONGER:
        offer(*steps(blocks * longer, bits, symmetric))
    for _ in range(_FITS):
        codes = encode(blocks, scales, zeros, bits) - zeros
        weighed = codes * counts
        square = (weighed * codes).sum(-1, keepdim=True)
        fitted = (weighed * blocks).sum(-1, keepdim=True) / square
        fitted = torch.where((square > 0) & (fitted != 0), fitted, scales)
        offer(rounded_scales(fitted) if symmetric else fitted, zeros)
    return scales, zeros


def round_by_inputs(
    weight: Tensor, inputs: Tensor, bits: int, block: int, symmetric: bool, damping: float
) -> Packed:
    """A weight [N,K] in up to 4 bits: searched steps, and the errors fed back (GPTQ); in more to the nearest."""
    if bits > 4:  # which err so little that nothing is gained, and symmetric, as kernels take them
        return round_to_nearest(weight, bits, block, True)
    counts = in_blocks(importance(inputs)[None], block)[0]
    choose: Steps = partial(searched_steps, counts)
    return round_with_feedback(
        weight, *feedback_of(inputs, damping), bits, block, symmetric, choose
    )
