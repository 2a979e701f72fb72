"""Weights in blocks of few bits: a row's block of numbers shares a scale, and may share a zero point.

A number is `(q - zero) * scale`; without zero points `zero` is the middle, 2^(bits - 1). Scales are
float32 or bfloat16. Codes are packed along the row, the first in the lowest
bits; a last block that is not full is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.op import Op

_PART = (
    1 << 23
)  # elements of a weight that are float32 at a time: of a large vocabulary it is larger than the model


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] below 2^bits -> bytes [..., ceil(n * bits / 8)], uint8."""
    per = 8 // bits
    codes = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % per)).contiguous()
    if per == 1:
        return codes
    parts = codes.view(*codes.shape[:-1], -1, per)
    out = parts[..., 0].clone()
    for i in range(1, per):
        out |= parts[..., i] << (bits * i)
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Bytes [..., n] -> codes [..., n * 8 / bits], uint8."""
    per = 8 // bits
    if per == 1:
        return packed
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(per)]
    return torch.stack(parts, dim=-1).flatten(-2)


def dequantize(q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """q [N, blocks, bytes], scales [N, blocks], zeros [N, bytes] or none -> float32 [N, blocks * block]."""
    codes = unpack(q, bits).float()
    if zeros is None:
        codes -= 2 ** (bits - 1)
    else:
        codes -= unpack(zeros, bits)[:, : scales.shape[1], None]
    weight: Tensor = codes.mul_(scales.unsqueeze(-1)).flatten(1)
    return weight


def round_activations(x: Tensor, block: int) -> Tensor:
    """x [..., K] as the integer products see it: in each block, 127 steps up to the largest value."""
    width = x.shape[-1]
    blocks = F.pad(x, (0, -width % block)).unflatten(-1, (-1, block))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    rounded: Tensor = (blocks / torch.where(step == 0, 1, step)).round() * step
    return rounded.flatten(-2)[..., :width]


def exact_linear(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    block: int,
) -> Tensor:
    """`quantized_linear` of inputs as they are: only the weights lie in few bits."""
    rows = max(1, _PART * len(q) // max(1, q.numel() * 8 // bits))
    if rows >= len(q):
        return F.linear(x, dequantize(q, scales, zeros, bits)[:, : x.shape[-1]], bias)
    out = x.new_empty(*x.shape[:-1], len(q))
    for start in range(0, len(q), rows):
        own = slice(start, start + rows)
        part = None if zeros is None else zeros[own]
        weight = dequantize(q[own], scales[own], part, bits)[:, : x.shape[-1]]
        out[..., own] = F.linear(x, weight, None if bias is None else bias[own])
    return out


def exact_expert_linear(
    x: Tensor, ids: Tensor, q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int
) -> Tensor:
    """`quantized_expert_linear` of inputs as they are."""
    out = x.new_zeros(x.shape[0], q.shape[1])
    for expert in ids.unique().tolist():
        rows = (ids == expert).nonzero().flatten()
        offsets = None if zeros is None else zeros[expert]
        out[rows] = exact_linear(x[rows], q[expert], scales[expert], offsets, None, bits, block)
    return out


def _quantized_linear(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    block: int,
) -> Tensor:
    return exact_linear(round_activations(x, block), q, scales, zeros, bias, bits, block)


def _quantized_expert_linear(
    x: Tensor, ids: Tensor, q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int
) -> Tensor:
    return exact_expert_linear(round_activations(x, block), ids, q, scales, zeros, bits, block)


def _quantized_embedding(
    ids: Tensor, q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int, width: int
) -> Tensor:
    flat = ids.flatten()
    part = None if zeros is None else zeros[flat]
    rows = dequantize(q[flat], scales[flat], part, bits)[:, :width]
    return rows.contiguous().view(*ids.shape, width)


# x [..., K], q [N, K/block, block*bits/8] uint8, scales [N, K/block], zeros [N, K/block*bits/8] or
# none, bias [N] or none -> [..., N]. x is rounded too (round_activations).
quantized_linear = Op(
    "quantized_linear",
    "(Tensor x, Tensor q, Tensor scales, Tensor? zeros, Tensor? bias, int bits, int block) -> Tensor",
    reference=_quantized_linear,
    shape=lambda x, q, *rest: x.new_empty((*x.shape[:-1], q.shape[0])),
)

# x [N,K], ids [N] (below X), and for each of X experts what a linear has: q [X, F, K/block,
# block*bits/8] uint8, scales [X, F, K/block], zeros [X, F, K/block*bits/8] or none -> [N,F]
quantized_expert_linear = Op(
    "quantized_expert_linear",
    "(Tensor x, Tensor ids, Tensor q, Tensor scales, Tensor? zeros, int bits, int block) -> Tensor",
    reference=_quantized_expert_linear,
    shape=lambda x, ids, q, *rest: x.new_empty((x.shape[0], q.shape[1])),
)

# Products that round their input: a difference in its last place may take it to the next step.
PRODUCTS = (quantized_linear.default, quantized_expert_linear.default)
# What each of them computes where nothing rounds its input.
EXACT: dict[Any, Callable[..., Tensor]] = {
    quantized_linear.default: exact_linear,
    quantized_expert_linear.default: exact_expert_linear,
}

# ids [...], the rest as above, width the K of a row -> [..., K]
quantized_embedding = Op(
    "quantized_embedding",
    "(Tensor ids, Tensor q, Tensor scales, Tensor? zeros, int bits, int block, int width) -> Tensor",
    reference=_quantized_embedding,
    shape=lambda ids, q, scales, zeros, bits, block, width: scales.new_empty(
        (*ids.shape, width), dtype=torch.float32
    ),
)
