"""Rope, and appending to the cache in place: keys turned and values stored in one launch per layer."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops import codec, flat, kv, rope
from accel.lowering.triton.kernels.place import place
from accel.lowering.triton.kernels.place_coded import place_coded
from accel.lowering.triton.kernels.rotate import rotate
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.sizes import power, rows
from accel.lowering.triton.writer.table import lower

_CHANNELS = 2048  # of one program
Turn = tuple[Tensor, Tensor, Tensor, bool]  # positions, cos, sin, interleaved


def turned(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`rope`: [B,H,T,D], by token in memory."""
    batch, heads, tokens, width = x.shape
    x = rows(x)
    out = x.new_empty(batch, tokens, heads, width)
    positions = rows(positions)
    if out.numel():
        count, block = _tile(tokens * heads, width)
        rotate[(-(-tokens * heads // count), batch)](
            x, positions, cos.contiguous(), sin.contiguous(), out, tokens, heads, cos.shape[1],
            *x.stride()[:3], positions.stride(0), D=width, TURN=_way(interleaved), ROWS=count, BLOCK=block,
        )  # fmt: skip
    return out.transpose(1, 2)


def append(buffer: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    """`kv_append` into the buffer itself, [B,C] or [B,G,C]."""
    axis = buffer.dim() - 1
    index = slots.unsqueeze(1) + torch.arange(new.shape[axis], device=new.device)  # [B,T]
    index = index if axis == 1 else index.unsqueeze(1).expand(new.shape)
    return buffer.scatter_(axis, index, new)


def append_flat(buffer: Tensor, new: Tensor, slots: Tensor, owner: Tensor) -> Tensor:
    """`flat_append` into the buffer itself."""
    row, number = owner.unbind(1)
    if buffer.dim() == 2:
        buffer[row, slots[row] + number] = new[0]
    else:
        buffer[row, :, slots[row] + number] = new[0].transpose(0, 1)
    return buffer


def place_keys(buffer: Tensor, new: Tensor, slots: Tensor, turn: Turn | None) -> Tensor:
    """`kv_append` of `rope`, into the buffer itself."""
    _place(buffer, new, None, None, slots, turn)
    return buffer


def place_both(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor, turn: Turn | None
) -> tuple[Tensor, Tensor]:
    """The same with values that go, as they are, to the same slots of their own buffer."""
    _place(keys, k, values, v, slots, turn)
    return keys, values


def _place(
    buffer: Tensor,
    x: Tensor,
    second: Tensor | None,
    y: Tensor | None,
    slots: Tensor,
    turn: Turn | None,
) -> None:
    batch, groups, tokens, width = x.shape
    x, y = rows(x), None if y is None else rows(y)
    wide = width if y is None else y.shape[3]
    if not x.numel():
        return
    positions, cos, sin = _turning(x, slots, turn)
    count, block = _tile(tokens * groups, max(width, wide))
    place[(-(-tokens * groups // count), batch)](
        x, x if y is None else y, buffer, buffer if second is None else second, slots, positions, cos,
        sin, tokens, groups, buffer.shape[2], 0 if turn is None else cos.shape[1],
        *x.stride()[:3], *(x if y is None else y).stride()[:3], positions.stride(0),
        D=width, DY=wide, TURN="no" if turn is None else _way(turn[3]), BOTH=y is not None,
        ROWS=count, BLOCK=block,
    )  # fmt: skip


def place_rounded(
    codes: Tensor, scales: Tensor, new: Tensor, slots: Tensor, turn: Turn | None
) -> tuple[Tensor, Tensor]:
    """`kv_append` of `encode_rows` of `rope`: codes [B,G,C,D] and scales [B,G,C] in place."""
    batch, groups, tokens, width = new.shape
    x = rows(new)
    if x.numel():
        positions, cos, sin = _turning(x, slots, turn)
        count, block = _tile(tokens * groups, width)
        place_coded[(-(-tokens * groups // count), batch)](
            x, codes, scales, slots, positions, cos, sin, tokens, groups, codes.shape[2],
            0 if turn is None else cos.shape[1], *x.stride()[:3], positions.stride(0),
            D=width, TURN="no" if turn is None else _way(turn[3]), ROWS=count, BLOCK=block,
        )  # fmt: skip
    return codes, scales


def _turning(x: Tensor, slots: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, cos and sin; something to point at where nothing turns."""
    if turn is None:
        return slots.unsqueeze(1), x, x
    return rows(turn[0]), turn[1].contiguous(), turn[2].contiguous()


def _way(interleaved: bool) -> str:
    return "pairs" if interleaved else "halves"


def _tile(count: int, width: int) -> tuple[int, int]:
    """Rows of one program, and channels of a row, both powers of two."""
    block = power(width)
    return min(power(count), max(1, _CHANNELS // block)), block


@lower(rope.rope.default)
def rope_rule(b: Builder, *operands: Any) -> fx.Node:
    return b.call(turned, *operands)


@lower(kv.kv_append.default)
def append_rule(b: Builder, buffer: fx.Node, new: fx.Node, slots: fx.Node) -> fx.Node:
    """Keys are turned on the way, and values go with the keys before them; positions and scales as they are."""
    if len(b.shape(buffer)) < 4:
        if (codes := _codes_before(new, slots)) is not None:
            return _rounded(b, codes, buffer, slots)
        return _writes(b.call(append, buffer, new, slots), buffer)
    if new.target is turned:  # if nobody else reads it, it is dropped
        return _writes(b.call(place_keys, buffer, new.args[0], slots, new.args[1:]), buffer)
    keys = _keys_before(b, slots)
    if keys is None:
        return _writes(b.call(place_keys, buffer, new, slots, None), buffer)
    both = b.call(place_both, keys.args[0], buffer, keys.args[1], new, slots, keys.args[3])
    return _split(b, both, keys, buffer)


@lower(flat.flat_append.default)
def flat_append_rule(
    b: Builder, buffer: fx.Node, new: fx.Node, slots: fx.Node, owner: fx.Node
) -> fx.Node:
    """As the tokens are."""
    return _writes(b.call(append_flat, buffer, new, slots, owner), buffer)


def _split(b: Builder, both: fx.Node, first: fx.Node, buffer: fx.Node) -> fx.Node:
    """`first`, which wrote a buffer, becomes a part of a call that writes another one too; that part."""
    both.meta["into"] = (*first.meta.pop("into"), buffer)
    first.target, first.args = operator.getitem, (both, 0)
    both.append(first)
    with b.graph.inserting_after(first):
        stored = b.call(operator.getitem, both, 1)
    stored.meta["writes"] = buffer
    return stored


def _codes_before(scales: fx.Node, slots: fx.Node) -> fx.Node | None:
    """Where `scales` are of rows that were rounded: their codes, on the way to the same slots, unread."""
    if scales.target is not operator.getitem or scales.args[1] != 1:
        return None
    source = scales.args[0]
    if not isinstance(source, fx.Node) or source.target is not codec.encode_rows.default:
        return None
    ways = [w for code in source.users if code is not scales for w in code.users]
    if len(ways) != 1 or ways[0].target is not place_keys or ways[0].args[2] is not slots:
        return None
    return ways[0] if not ways[0].users else None


def _rounded(b: Builder, codes: fx.Node, scales: fx.Node, slots: fx.Node) -> fx.Node:
    """Codes and their scales from one launch."""
    part: Any = codes.args[1]
    x = part.args[0].args[0]
    turn = x.args[1:] if x.target is turned else None
    both = b.call(
        place_rounded, codes.args[0], scales, x if turn is None else x.args[0], slots, turn
    )
    return _split(b, both, codes, scales)


def _keys_before(b: Builder, slots: fx.Node) -> fx.Node | None:
    """Keys that go to the same slots and that nothing has read yet."""
    for node in reversed(b.graph.nodes):
        if node.target is place_keys:
            return node if node.args[2] is slots and not node.users else None
        if node.target is place_both:
            return None
    return None


def _writes(node: fx.Node, buffer: fx.Node) -> fx.Node:
    """A node that writes a buffer and gives it back."""
    node.meta["into"], node.meta["writes"] = (buffer,), buffer
    return node
