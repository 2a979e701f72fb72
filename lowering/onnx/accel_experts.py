"""Experts in ONNX: few rows gather their weights; many are sorted out expert by expert, in a loop."""

from __future__ import annotations

import torch
from onnx import GraphProto, NodeProto, TensorProto, helper

from accel.ir.ops import experts
from accel.lowering.onnx.builder import MICROSOFT, Builder
from accel.lowering.onnx.table import lower


@lower(experts.expert_linear.default)
def expert_linear(b: Builder, x: str, ids: str, weight: str, transposed: bool) -> str:
    shape = [int(d) for d in b.shape(weight)]
    width = shape[2 if transposed else 1]
    weight = b.use(weight)
    few = b.node("Less", b.size(ids, 0), b.constant(shape[0], torch.int64))
    zeros = b.node("Expand", b.constant(0.0, torch.float32), b.concat_ints([b.size(ids, 0), width]))
    given = (x, ids, weight, b.ints(1 if transposed else 2), transposed, width)
    many = _each(*given, zeros, b.constant(shape[0], torch.int64), b.ints(0), b.constant(True))
    return str(b.node("If", few, then_branch=_gathered(*given), else_branch=many))


def _gathered(
    x: str, ids: str, weight: str, axis: str, transposed: bool, width: int
) -> GraphProto:
    """x [N,E] times weight[ids], as a batch of single rows."""
    pair = ["few.x", "few.w"] if transposed else ["few.w", "few.x"]
    steps = [
        _node("Gather", [weight, ids], "few.w", axis=0),
        _node("Unsqueeze", [x, axis], "few.x"),
        _node("MatMul", pair, "few.y1"),
        _node("Squeeze", ["few.y1", axis], "few.y"),
    ]
    return helper.make_graph(steps, "few", [], [_info("few.y", "N", width)])


def _each(
    x: str, ids: str, weight: str, axis: str, transposed: bool, width: int,
    zeros: str, count: str, first: str, true: str,
) -> GraphProto:  # fmt: skip
    """A loop over the experts: the rows of each, at once."""
    body = [
        _node("Equal", [ids, "each.e"], "each.hit"),
        _node("NonZero", ["each.hit"], "each.rows1"),  # [1,n]
        _node("Squeeze", ["each.rows1", first], "each.rows"),
        _node("Transpose", ["each.rows1"], "each.at", perm=[1, 0]),
        _node("Gather", [x, "each.rows"], "each.x", axis=0),
        _node("Gather", [weight, "each.e"], "each.w", axis=0),
        _node("FusedMatMul", ["each.x", "each.w"], "each.y", MICROSOFT, transB=int(not transposed)),
        _node("ScatterND", ["each.before", "each.at", "each.y"], "each.after"),
        _node("Identity", ["each.going"], "each.on"),
    ]
    scalar = [("each.e", TensorProto.INT64), ("each.going", TensorProto.BOOL)]
    inner = helper.make_graph(
        body,
        "each",
        [*(helper.make_tensor_value_info(n, t, []) for n, t in scalar), _info("each.before", "N", width)],
        [helper.make_tensor_value_info("each.on", TensorProto.BOOL, []), _info("each.after", "N", width)],
    )  # fmt: skip
    loop = _node("Loop", [count, true, zeros], "many.y", body=inner)
    return helper.make_graph([loop], "many", [], [_info("many.y", "N", width)])


def _node(op: str, inputs: list[str], output: str, domain: str = "", **attributes: object) -> NodeProto:
    return helper.make_node(op, inputs, [output], name=output, domain=domain, **attributes)


def _info(name: str, *shape: object) -> object:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
