"""Products with weights of few bits: inputs rounded once for all that read them, codes read as they lie."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops import quantized
from accel.lowering.triton.kernels.multiply import multiply
from accel.lowering.triton.kernels.steps_of import steps_of
from accel.lowering.triton.writer import chip
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.sizes import power, rows
from accel.lowering.triton.writer.table import lower
from accel.lowering.triton.writer.tuned import Choice, Tuned

_LEAST = 16  # rows of a tile, as tl.dot takes them
_MOST = 128  # of blocks of up to 64 codes; of longer ones half
_TILE = 128 * 64  # results of a tile, at most: more do not fit into registers
_NUMBERS = 1024  # of x, in one program that rounds
_SPLITS = 32  # at most, of one product

_multiply = Tuned(multiply, ("BITS", "BLOCK", "BLOCK_M", "N", "blocks"))


def _candidates(
    device: torch.device, size: int, width: int, tiles: int, blocks: int
) -> list[Choice]:
    """Tiles of so many rows: as many splits of the blocks as fill the device, or a few times fewer."""
    found = []
    for wide in (64, 32, 128):
        if size * wide > _TILE:
            continue
        warps = 8 if size * wide >= _TILE // 2 else 4
        programs = tiles * -(-width // wide)
        most = chip.splits(device, programs, min(_SPLITS, blocks))
        for splits in (most, -(-most // 4)):
            constants = {"BLOCK_N": wide, "SPLITS": splits}
            found.append(Choice(constants, warps, 3))
    return found


def in_steps(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`round_activations` of x [..., K]: codes int8 [M,blocks·block], and the steps of the blocks [M,blocks]."""
    flat = rows(x.reshape(-1, x.shape[-1]))
    count = -(-x.shape[-1] // block)
    codes = x.new_empty((len(flat), count * block), dtype=torch.int8)
    steps = x.new_empty((len(flat), count))
    several = min(power(count), max(1, _NUMBERS // block))
    if flat.numel():
        steps_of[(len(flat), -(-count // several))](
            flat, codes, steps, flat.shape[1], count, flat.stride(0), BLOCK=block, COUNT=several,
            num_warps=1 if several * block < _NUMBERS else 4,
        )  # fmt: skip
    return codes, steps


def linear(
    x: Tensor,
    codes: Tensor,
    steps: Tensor,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    block: int,
) -> Tensor:
    """`quantized_linear` of x, of which `in_steps` gave codes and steps."""
    out = _product(codes, steps, q, scales, zeros, bias, bits, block)
    return out.view(*x.shape[:-1], len(q))


def routes(ids: Tensor, count: int, block: int) -> tuple[Tensor, ...]:
    """Rows by their expert, of `count`: an order of the rows; and of each tile of it, its expert, start and end. There
    are as many tiles as may be needed, so that the host is asked nothing.
    """
    size = _rows_of_tile(-(-len(ids) // count), block)
    order = ids.argsort(stable=True)
    several = ids.new_zeros(count).index_add_(0, ids, torch.ones_like(ids))
    tiles = (several + size - 1) // size
    upto = tiles.cumsum(0)
    number = torch.arange(min(len(ids), -(-len(ids) // size) + count), device=ids.device)
    expert = torch.searchsorted(upto, number, right=True).clamp(max=count - 1)
    ends = several.cumsum(0)[expert]
    starts = ends - several[expert] + (number - (upto - tiles)[expert]) * size
    tables = expert, starts, torch.minimum(starts + size, ends)
    return order, *(table.int() for table in tables)


def expert_linear(
    tables: tuple[Tensor, ...],
    codes: Tensor,
    steps: Tensor,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    block: int,
) -> Tensor:
    """`quantized_expert_linear`; `tables`: what `routes` gives."""
    size = _rows_of_tile(-(-len(codes) // len(q)), block)
    return _product(codes, steps, q, scales, zeros, None, bits, block, tables, size)


def _product(
    codes: Tensor,
    steps: Tensor,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    block: int,
    routes: tuple[Tensor, ...] | None = None,
    size: int = 0,
) -> Tensor:
    lines, width, blocks = len(codes), *scales.shape[-2:]
    if not lines:
        return steps.new_empty(0, width)
    size = size or _rows_of_tile(lines, block)
    tiles = -(-lines // size) if routes is None else len(routes[1])
    candidates = _candidates(codes.device, size, width, tiles, blocks)
    most = max(choice["SPLITS"] for choice in candidates)
    out = steps.new_empty(most, lines, width)
    order, *tables = routes or (codes,) * 4
    chosen = _multiply(
        lambda x: (-(-width // x["BLOCK_N"]), tiles, x["SPLITS"]), candidates,
        codes, steps, q.contiguous(), scales.contiguous(), q if zeros is None else zeros.contiguous(),
        steps if bias is None else bias.contiguous(), out, order, *tables,
        lines, width, blocks, q.shape[-2] * q.shape[-1], 0 if zeros is None else zeros.shape[-1],
        BITS=bits, BLOCK=block, ZEROS=zeros is not None, BIAS=bias is not None, ROUTED=routes is not None, BLOCK_M=size,
    )  # fmt: skip
    splits = chosen["SPLITS"]
    return out[0] if splits == 1 else out[:splits].sum(0)


def _rows_of_tile(lines: int, block: int) -> int:
    return min(_MOST if block <= 64 else _MOST // 2, max(_LEAST, power(lines)))


def _rounded(b: Builder, x: fx.Node, block: int) -> tuple[fx.Node, fx.Node]:
    """Codes and steps of x, once for all that read them."""
    found = b.once(in_steps, x, block)
    return b.once(operator.getitem, found, 0), b.once(operator.getitem, found, 1)


@lower(quantized.quantized_linear.default)
def linear_rule(
    b: Builder,
    x: fx.Node,
    q: fx.Node,
    scales: fx.Node,
    zeros: Any,
    bias: Any,
    bits: int,
    block: int,
) -> Any:
    if b.value(x).dtype != torch.float32:
        return NotImplemented
    return b.call(linear, x, *_rounded(b, x, block), q, scales, zeros, bias, bits, block)


@lower(quantized.quantized_expert_linear.default)
def expert_linear_rule(
    b: Builder,
    x: fx.Node,
    ids: fx.Node,
    q: fx.Node,
    scales: fx.Node,
    zeros: Any,
    bits: int,
    block: int,
) -> Any:
    if b.value(x).dtype != torch.float32:
        return NotImplemented
    tables = b.once(routes, ids, int(b.shape(q)[0]), block)
    return b.call(expert_linear, tables, *_rounded(b, x, block), q, scales, zeros, bits, block)
