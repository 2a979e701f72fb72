"""Weights in blocks of few bits: a row's block of numbers shares a scale, and may share a zero point.

A number is `(q - zero) * scale`; without zero points `zero` is the middle, 2^(bits - 1). Scales are
float32 or bfloat16. Codes of 4 and 8 bits are packed along the row, the first in the lowest
bits; a last block that is not full is padded. Those of 2, 3, 5 and 6 bits lie in groups of 64, each in planes
of 4 bits, of 2 and of 1, as many as the bits need, the lowest bits first; each plane is packed like codes of its bits.
Zero points of up to 4 bits take 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.op import Op

_PART = (
    1 << 23
)  # elements of a weight that are float32 at a time: of a large vocabulary it is larger than the model


GROUP = 64  # codes of a group of planes
_PLANES = (4, 2, 1)  # their bits


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


def in_planes(bits: int) -> bool:
    """Whether codes of so many bits lie in groups of planes."""
    return bits not in (4, 8)


def planes(bits: int) -> Iterator[tuple[int, int, slice]]:
    """Bits of each plane, the lowest bit of a code that it holds, and its bytes of a group."""
    place = start = 0
    for own in _PLANES:
        if bits & own:
            end = start + GROUP * own // 8
            yield own, place, slice(start, end)
            place, start = place + own, end


def pack_blocks(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., blocks, block] below 2^bits -> q [..., blocks, block * bits / 8]; of bits that lie in planes
    [..., groups, 8 * bits].
    """
    if not in_planes(bits):
        return pack(codes, bits)
    rows = codes.to(torch.uint8).flatten(-2)
    groups = F.pad(rows, (0, -rows.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    return torch.cat(
        [pack(groups >> place & (2**own - 1), own) for own, place, _ in planes(bits)], -1
    )


def unpack_blocks(q: Tensor, bits: int, blocks: int, block: int) -> Tensor:
    """q [..., groups, bytes] as `pack_blocks` makes it -> codes [..., blocks, block], uint8."""
    if not in_planes(bits):
        return unpack(q, bits)
    groups = q.new_zeros(*q.shape[:-1], GROUP)
    for own, place, where in planes(bits):
        groups |= unpack(q[..., where], own) << place
    codes: Tensor = groups.flatten(-2)[..., : blocks * block].unflatten(-1, (blocks, block))
    return codes


def zero_bits(bits: int) -> int:
    """Of the zero points of codes of so many bits."""
    return 4 if bits <= 4 else 8


def dequantize(q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int) -> Tensor:
    """q as `pack_blocks` makes it, scales [N, blocks], zeros [N, bytes] or none -> float32 [N, blocks * block]."""
    codes = unpack_blocks(q, bits, scales.shape[1], block).float()
    if zeros is None:
        codes -= 2 ** (bits - 1)
    else:
        codes -= unpack(zeros, zero_bits(bits))[:, : scales.shape[1], None]
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
        return F.linear(x, dequantize(q, scales, zeros, bits, block)[:, : x.shape[-1]], bias)
    out = x.new_empty(*x.shape[:-1], len(q))
    for start in range(0, len(q), rows):
        own = slice(start, start + rows)
        part = None if zeros is None else zeros[own]
        weight = dequantize(q[own], scales[own], part, bits, block)[:, : x.shape[-1]]
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
    rows = dequantize(q[flat], scales[flat], part, bits, block)[:, :width]
    return rows.contiguous().view(*ids.shape, width)


# x [..., K], q [N, ...] uint8 (`pack_blocks`), scales [N, K/block], zeros [N, K/block*4/8] (of 8 bits: K/block) or
# none, bias [N] or none -> [..., N]. x is rounded too (round_activations).
quantized_linear = Op(
    "quantized_linear",
    "(Tensor x, Tensor q, Tensor scales, Tensor? zeros, Tensor? bias, int bits, int block) -> Tensor",
    reference=_quantized_linear,
    shape=lambda x, q, *rest: x.new_empty((*x.shape[:-1], q.shape[0])),
)

# x [N,K], ids [N] (below X), and for each of X experts what a linear has: q [X, F, ...] uint8, scales [X, F,
# K/block], zeros [X, F, ...] or none -> [N,F]
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
