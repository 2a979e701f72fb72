"""Each aten lowering against torch: one operator, symbolic sizes, at several sizes."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import fx, nn

from accel.ir.errors import LoweringError
from accel.lowering.onnx.builder import Builder, Param
from accel.lowering.onnx.fallback import lower_node
from accel.lowering.onnx.table import lower

from . import aten_layout, aten_values
from .aten_case import SIZES, B, Call, In, Lowered, T, Weight, bools, ints

aten = torch.ops.aten
CASES = [*aten_values.cases(), *aten_layout.cases()]
X = In(B, T, 8)
HEADS = In(B, 4, T, 8)


def identifier(case: Call) -> str:
    return str(case.op) if "." in str(case.op) else str(getattr(case.op, "__name__", case.op))


@pytest.mark.parametrize("case", CASES, ids=identifier)
def test_same_as_torch(case: Call) -> None:
    lowered = Lowered(case)
    for sizes in SIZES:
        lowered.check(sizes)


def operators(x: Any) -> set[Any]:
    """Every operator in a case."""
    if isinstance(x, Call):
        return {x.op}.union(*map(operators, [*x.args, *x.kwargs.values()]))
    return set().union(*map(operators, x)) if isinstance(x, (list, tuple)) else set()


def test_every_lowering_has_a_case() -> None:
    def here(op: Any) -> bool:
        return not isinstance(op, torch._ops.OpOverload) or op.namespace == "aten"

    tested = set().union(*map(operators, CASES))
    assert sorted(str(op) for op in lower.rules if here(op) and op not in tested) == []


def test_a_wrong_lowering_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lower.rules, aten.silu.default, lambda b, x: b.node("Sigmoid", x))
    with pytest.raises(AssertionError, match="not close"):
        test_same_as_torch(Call(aten.silu.default, X))


# Few nodes


def call(op: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(op, *args, **kwargs)


@pytest.mark.parametrize(
    ("case", "nodes"),
    [
        (call(aten.view.default, X, [B, T, 2, 4]), ["Reshape"]),
        (call(aten._unsafe_view.default, In(B, T, 4, 2), [B, T, 8]), ["Reshape"]),
        (call(aten.view.default, X, [-1]), ["Reshape"]),
        (call(aten.view.default, X, [B, T, 8]), []),
        (call(aten.expand.default, In(B, 2, 1, T, 8), [B, 2, 3, T, 8]), ["Expand"]),
        (call(aten.expand.default, X, [B, T, -1]), []),
        (call(aten.slice.Tensor, X, 1, 0, 2**63 - 1), []),
        (call(aten.slice.Tensor, X, 2, 0, 8), []),
        (call(aten.transpose.int, X, 1, 1), []),
        (call(aten.squeeze.dim, X, 2), []),
        (call(aten._to_copy.default, X, dtype=torch.float32), []),
        (call(aten.pow.Tensor_Scalar, X, 2), ["Mul"]),
        (call(aten.silu.default, X), ["QuickGelu"]),
        (call(aten.clamp.default, X, -1, 1), ["Clip"]),
        (call(aten.linear.default, X, Weight(16, 8)), ["MatMul"]),
    ],
    ids=lambda x: str(x.op) if isinstance(x, Call) else "+".join(x) or "nothing",
)
def test_few_nodes(case: Call, nodes: list[str]) -> None:
    lowered = Lowered(case)
    assert lowered.nodes == nodes
    lowered.check(SIZES[2])


def test_a_weight_of_its_own_is_stored_transposed() -> None:
    lowered = Lowered(Call(aten.linear.default, X, Weight(16, 8)))
    (weight,) = lowered.initializers
    assert weight.name == "weight.x1.T" and list(weight.dims) == [8, 16]


def test_a_tied_weight_is_stored_once() -> None:
    """Embedding and head read the same initializer, in the layout of the model."""
    table = Weight(16, 8)
    found = Call(aten.embedding.default, table, ints(B, T, low=0, high=15))
    lowered = Lowered(Call(aten.linear.default, found, table), shared=True)
    (weight,) = lowered.initializers
    assert weight.name == "weight.x0" and list(weight.dims) == [16, 8]
    assert lowered.nodes == ["Gather", "FusedMatMul"]
    for sizes in SIZES:
        lowered.check(sizes)


def test_a_row_that_may_see_nothing_is_zero() -> None:
    none = Call(aten.zeros_like.default, bools(B, 1, T, T))
    for mask in (none, Call(aten.where.ScalarSelf, none, 0.0, In(low=-1e30, high=-1e30))):
        case = Call(aten.scaled_dot_product_attention.default, HEADS, HEADS, HEADS, mask)
        Lowered(case).check(SIZES[2])


# Operators without a rule


@pytest.mark.parametrize(
    "case",
    [
        Call(aten.diff.default, ints(B, T), 1, -1),
        Call(aten.hardswish.default, X),
        Call(aten.selu.default, X),
        Call(aten.tril_indices.default, 3, 3),
    ],
    ids=identifier,
)
def test_decomposed(case: Call) -> None:
    assert case.op not in lower.rules
    lowered = Lowered(case)
    for sizes in SIZES[::2]:
        lowered.check(sizes)


def test_a_missing_lowering_is_named() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")
    node = graph.call_function(aten.bernoulli.default, (x,))
    node.meta["nn_module_stack"] = {"a": ("model.layers.0.mlp", nn.Module)}
    with pytest.raises(LoweringError, match=r"aten.bernoulli.default \(node bernoulli, from model"):
        lower_node(Builder(lambda *_: onnx.TensorProto()), node, ("x",), {})


# Builder


def builder() -> Builder:
    def write(name: str, tensor: torch.Tensor) -> onnx.TensorProto:
        return onnx.TensorProto(name=name)

    return Builder(write)


def test_equal_nodes_and_constants_are_written_once() -> None:
    b = builder()
    assert b.node("Neg", "x") == b.node("Neg", "x") != b.node("Neg", "y")
    assert b.ints(1, 2) == b.ints(1, 2) != b.constant([1, 2], torch.int32)
    assert b.constant(0.0) != b.constant(-0.0)
    assert len(b.nodes) == 2


def test_prune_keeps_what_outputs_need() -> None:
    b = builder()
    kept = b.node("Add", "x", b.constant(1.0, torch.float32))
    b.node("Mul", kept, Param("weight", torch.ones(3)))
    b.prune([kept])
    assert [n.op_type for n in b.nodes] == ["Add"] and len(b.initializers) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8])
def test_constants_of_every_dtype(dtype: torch.dtype) -> None:
    b = builder()
    b.constant(torch.tensor([1, 0, 1], dtype=dtype))
    (made,) = b.initializers
    assert onnx.numpy_helper.to_array(made).astype("float32").tolist() == [1, 0, 1]
