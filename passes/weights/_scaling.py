"""Scales for the channels that matter: activation-aware weight quantisation (AWQ, arXiv:2306.00978).

Channels with large inputs get finer steps: their columns are multiplied, and their inputs divided, by
a power of the mean magnitude, chosen by trying. And each block gets the steps with which its own
products err least: mostly shorter ones, though its largest values are then cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.quantized import (
    pack,
    pack_blocks,
    round_activations,
    zero_bits,
)
from accel.passes.weights._blocks import Packed, encode, in_blocks, steps

_POWERS = tuple(i / 10 for i in range(11))
_LONGER = tuple(
    i / 20 for i in range(12, 24)
)  # 0.6 to 1.15 of the step that reaches the largest value
_ELEMENTS = 1 << 20  # of a weight that are tried at a time
_SMALLEST = 1e-3  # mean magnitude of a channel, as a share of all channels': quieter ones count so


def channel_scales(
    inputs: Tensor, weights: Sequence[Tensor], channels: Tensor, size: int,
    round_: Callable[[Tensor], Packed],
) -> Tensor | None:  # fmt: skip
    """What to multiply columns by, [size]; none where rounding the weights as they are is best.

    inputs [tokens,K] of all weights [N,K]; channel c is scaled by entry `channels[c]`, of `size`.
    """
    loud = torch.zeros(size).index_add_(0, channels, inputs.abs().mean(0))
    count = torch.zeros(size).index_add_(0, channels, torch.ones(len(channels)))
    loud = loud / count.clamp(min=1)
    used = count > 0
    loud = loud.clamp(min=_SMALLEST * float(loud[used].mean()) or 1.0)
    wanted = [F.linear(inputs, weight) for weight in weights]
    best, least = None, float("inf")
    for power in _POWERS:
        scale = loud**power
        scale = scale / (scale[used].max() * scale[used].min()).sqrt()
        by = scale[channels]
        error = sum(
            float((_product(inputs / by, round_(weight * by)) - want).square().sum())
            for weight, want in zip(weights, wanted, strict=True)
        )
        if error < least:
            least, best = error, torch.where(used, scale, 1.0) if power else None
    return best


def _product(inputs: Tensor, packed: Packed) -> Tensor:
    """What a product of few bits gives for inputs [tokens,K]."""
    weight = packed.weight()
    return F.linear(round_activations(inputs, packed.block), weight[:, : inputs.shape[1]])


def round_clipped(weight: Tensor, inputs: Tensor, bits: int, block: int, symmetric: bool) -> Packed:
    """A weight [N,K] rounded with the steps that err least in each block's products with [tokens,K]."""
    moments = _moments(inputs, block)
    rows = max(1, _ELEMENTS // weight.shape[1])
    parts = [_clipped(part, moments, bits, symmetric) for part in weight.float().split(rows)]
    q, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
    return Packed(q, scales, None if symmetric else zeros, bits, block)


def _moments(inputs: Tensor, block: int) -> Tensor:
    """Second moments of inputs [tokens,K] within each block, [blocks,block,block]."""
    blocks = in_blocks(inputs, block).transpose(0, 1)
    return blocks.mT @ blocks


def _clipped(
    weight: Tensor, moments: Tensor, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, scales [N,blocks] and packed zero points of some rows."""
    blocks = in_blocks(weight, moments.shape[1])
    least = torch.full(blocks.shape[:2], float("inf")).unsqueeze(-1)
    scales, zeros = steps(blocks, bits, symmetric)
    for longer in _LONGER:
        scale, zero = steps(blocks * longer, bits, symmetric)
        error = (encode(blocks, scale, zero, bits) - zero) * scale - blocks
        turned = (error.transpose(0, 1) @ moments).transpose(0, 1)
        harm = (turned * error).sum(-1, keepdim=True)
        better = harm < least
        least = torch.where(better, harm, least)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    codes = pack_blocks(encode(blocks, scales, zeros, bits), bits)
    return codes, scales.squeeze(-1), pack(zeros.squeeze(-1), zero_bits(bits))
