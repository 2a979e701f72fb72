"""The greedy choice of centres in ONNX: a loop of as many steps as there are centres."""

from __future__ import annotations

from typing import Any

import torch
from onnx import TensorProto, helper

from accel.ir.ops import centres
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower

_FAR = torch.finfo(torch.float32).max


@lower(centres.farthest_first.default)
def farthest_first(b: Builder, x: str, real: str, nearest: str, count: str) -> Any:
    zero, one = (b.constant(n, torch.float32) for n in (0.0, 1.0))
    none, far = b.constant(-1.0, torch.float32), b.constant(_FAR, torch.float32)
    odd = b.node("Not", b.node("LessOrEqual", b.node("Abs", x), far))  # NaN, infinite
    odd = b.node("ReduceMax", b.node("Cast", odd, to=DTYPES[torch.float32]), b.ints(-1), keepdims=0)
    real = b.node("And", real, b.node("Equal", odd, zero))
    x = b.node("Where", b.node("Unsqueeze", real, b.ints(3)), x, zero)
    start = b.node("Where", real, b.node("Min", nearest, far), none)
    order = b.node("Mul", start, zero)
    steps = b.node("Reshape", count, b.ints(1))
    slots = b.node(
        "Range", b.constant(0, torch.int64), _slots(b, start), b.constant(1, torch.int64)
    )
    last = b.node("Cast", steps, to=DTYPES[torch.float32])

    def node(op: str, *inputs: str, out: str, **attributes: Any) -> Any:
        return helper.make_node(op, list(inputs), [f"far.{out}"], name=f"far.{out}", **attributes)

    body = helper.make_graph(
        [
            node("Identity", "far.go", out="on"),
            node("ArgMax", "far.distance", out="best", axis=2, keepdims=1),
            node("Equal", slots, "far.best", out="same"),
            node("GreaterOrEqual", "far.distance", zero, out="open"),
            node("And", "far.same", "far.open", out="here"),
            node("Cast", "far.step", out="stepped", to=DTYPES[torch.float32]),
            node("Sub", last, "far.stepped", out="mark"),
            node("Where", "far.here", "far.mark", "far.order", out="order.after"),
            node("Cast", "far.same", out="chosen", to=DTYPES[torch.float32]),
            node("Unsqueeze", "far.chosen", b.ints(2), out="row"),
            node("MatMul", "far.row", x, out="centre"),
            node("Sub", x, "far.centre", out="apart"),
            node("ReduceSumSquare", "far.apart", b.ints(-1), out="square", keepdims=0),
            node("Min", "far.distance", "far.square", out="near"),
            node("Where", "far.here", none, "far.near", out="distance.after"),
        ],
        "farthest",
        [
            helper.make_tensor_value_info("far.step", TensorProto.INT64, []),
            helper.make_tensor_value_info("far.go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("far.distance", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("far.order", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("far.on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("far.distance.after", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("far.order.after", TensorProto.FLOAT, None),
        ],
    )
    distance, order = b.node("Loop", steps, b.constant(True), start, order, outputs=2, body=body)
    away = b.node("Max", distance, zero)
    rest = b.node("Div", away, b.node("Add", one, away))
    rest = b.node("Where", real, rest, none)
    return b.node("Where", b.node("Greater", order, zero), order, rest)


def _slots(b: Builder, x: str) -> str:
    """S of a value [B,G,S]."""
    return str(b.node("Squeeze", b.node("Shape", x, start=2, end=3)))
