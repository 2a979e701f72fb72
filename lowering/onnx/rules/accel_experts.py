"""Experts in ONNX. In float32 few rows gather their weights; many are sorted out expert by expert, in a loop.

Weights of few bits are only fast where MatMulNBits has packed them when the model is opened, which it
does with constants of its own graph. So each expert has a graph of one product, and a loop over the
experts that were chosen reaches its one through halves of halves: what others weigh is not read.
"""

from __future__ import annotations

import torch
from onnx import GraphProto, NodeProto, TensorProto, helper

from accel.ir.errors import LoweringError
from accel.ir.ops import experts, quantized
from accel.lowering.onnx.writer.builder import MICROSOFT, Builder, Param
from accel.lowering.onnx.writer.table import lower


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


def _gathered(x: str, ids: str, weight: str, axis: str, transposed: bool, width: int) -> GraphProto:
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


@lower(quantized.quantized_expert_linear.default)
def quantized_expert_linear(
    b: Builder, x: str, ids: str, q: str, scales: str, zeros: str | None, bits: int, block: int
) -> str:
    """Rows sorted by expert; the product of each expert that has some; rows in their own order again."""
    weights = [p for p in (q, scales, zeros) if p is not None]
    if bits not in (4, 8) or not all(isinstance(p, Param) for p in weights):
        raise LoweringError(
            "onnx: a quantised expert product needs constant weights of 4 or 8 bits"
        )
    count, width = (int(d) for d in b.shape(q)[:2])
    chosen, _, _, counts = b.node("Unique", ids, outputs=4)  # in rising order
    rows = b.node("Shape", ids)
    _, order = b.node("TopK", ids, rows, largest=0, outputs=2)
    _, back = b.node("TopK", order, rows, largest=0, outputs=2)
    named = [[f"each.{kind}{e}" for e in range(count)] for kind in ("q", "s", "z")]
    parts = zip(*(b.entries(p, n) for p, n in zip(weights, named, strict=False)), strict=True)  # type: ignore[arg-type]
    sizes = {"K": int(b.shape(x)[-1]), "N": width, "bits": bits, "block_size": block}
    tree = _expert([_product(list(own), e, sizes) for e, own in enumerate(parts)], 0)
    sorted_x = b.node("Gather", x, order, axis=0)
    body = _sorted(sorted_x, chosen, counts, b.ints(0), tree, width)
    none = b.node("SequenceEmpty", dtype=TensorProto.FLOAT)
    _, found = b.node(
        "Loop", b.size(chosen, 0), b.constant(True), b.ints(0), none, outputs=2, body=body
    )
    return str(b.node("Gather", b.node("ConcatFromSequence", found, axis=0), back, axis=0))


def _sorted(
    x: str, chosen: str, counts: str, first: str, tree: GraphProto, width: int
) -> GraphProto:
    """A step of the loop: the rows of the next expert, which follow the last one's, and their product."""
    int64 = TensorProto.INT64
    body = [
        _node("Gather", [chosen, "each.i"], "each.e", axis=0),
        _node("Unsqueeze", ["each.i", first], "each.at"),
        _node("Gather", [counts, "each.at"], "each.n", axis=0),
        _node("Add", ["each.start", "each.n"], "each.end"),
        _node("Slice", [x, "each.start", "each.end", first], "each.x"),
        *tree.node,
        _node("SequenceInsert", ["each.before", tree.output[0].name], "each.after"),
        _node("Identity", ["each.end"], "each.stop"),
        _node("Identity", ["each.going"], "each.on"),
    ]
    value, several = helper.make_tensor_value_info, helper.make_tensor_sequence_value_info
    given = [value("each.i", int64, []), value("each.going", TensorProto.BOOL, []),
             value("each.start", int64, [1]), several("each.before", TensorProto.FLOAT, ["n", width])]  # fmt: skip
    made = [value("each.on", TensorProto.BOOL, []), value("each.stop", int64, [1]),
            several("each.after", TensorProto.FLOAT, ["n", width])]  # fmt: skip
    return helper.make_graph(body, "each", given, made, initializer=list(tree.initializer))


def _product(weights: list[TensorProto], expert: int, sizes: dict[str, int]) -> GraphProto:
    """Rows each.x times the weights of one expert."""
    name = f"each.y{expert}"
    operands = ["each.x", *(w.name for w in weights)]
    product = _node("MatMulNBits", operands, name, MICROSOFT, accuracy_level=4, **sizes)
    return helper.make_graph(
        [product], name, [], [_info(name, "n", sizes["N"])], initializer=weights
    )


def _expert(graphs: list[GraphProto], first: int) -> GraphProto:
    """The graph, among those of the experts from `first` on, of expert each.e: halves of halves."""
    if len(graphs) == 1:
        return graphs[0]
    half = len(graphs) // 2
    middle = first + half
    name = f"each.y{first}-{first + len(graphs) - 1}"
    below = _node("Less", ["each.e", f"{name}.middle"], f"{name}.below")
    choice = _node(
        "If", [below.output[0]], name,
        then_branch=_expert(graphs[:half], first), else_branch=_expert(graphs[half:], middle),
    )  # fmt: skip
    bound = helper.make_tensor(f"{name}.middle", TensorProto.INT64, [], [middle])
    out = graphs[0].output[0]
    size = out.type.tensor_type.shape.dim[1].dim_value
    return helper.make_graph(
        [below, choice], name, [], [_info(name, "n", size)], initializer=[bound]
    )


def _node(
    op: str, inputs: list[str], output: str, domain: str = "", **attributes: object
) -> NodeProto:
    return helper.make_node(op, inputs, [output], name=output, domain=domain, **attributes)


def _info(name: str, *shape: object) -> object:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
