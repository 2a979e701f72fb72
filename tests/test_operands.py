"""Operands of a call are read and set by their name in the operator's schema."""

import pytest
import torch
from torch import fx

from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of, set_operand
from accel.ir.ops.rope import rope

aten = torch.ops.aten


def call(target, *args, **kwargs):
    return fx.Graph().call_function(target, args, kwargs)


def test_operands_are_found_wherever_they_are_given():
    node = call(rope.default, 1, 2, 3, interleaved=True)
    assert [operand_of(node, n) for n in ("x", "cos", "interleaved")] == [1, 3, True]
    assert operand_of(call(aten.linear.default, 1, 2), "bias") is None, "its default"
    with pytest.raises(ValueError, match="is given no slots"):
        operand_of(call(kv_append.default, 1, 2), "slots")
    with pytest.raises(ValueError, match="rows"):
        operand_of(node, "rows")


def test_operands_are_set_where_they_are_given():
    node = call(rope.default, 1, 2, 3, interleaved=True)
    set_operand(node, "cos", 4)
    set_operand(node, "interleaved", False)
    set_operand(node, "sin", 5)
    assert node.args == (1, 2, 4) and node.kwargs == {"interleaved": False, "sin": 5}
