"""What an attention reads of the cache."""

from __future__ import annotations

from torch import fx

from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.state import Part


def appends(node: fx.Node) -> bool:
    """Whether an attention reads keys that the step appends to a cache; an encoder's are not."""
    keys = operand_of(node, Part.KEYS)
    return isinstance(keys, fx.Node) and keys.target is kv_append.default


def cache_of(node: fx.Node, part: Part) -> fx.Node:
    """The placeholder of the keys or values that an attention reads, where the step appends to them."""
    stored = operand_of(node, part)
    assert isinstance(stored, fx.Node)
    buffer = operand_of(stored, "buffer")
    assert isinstance(buffer, fx.Node)
    return buffer
