"""Each aten lowering against torch: one operator, symbolic sizes, at several sizes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import onnx
import pytest
import torch
from torch import fx, nn

from accel.ir.errors import LoweringError
from accel.ir.weights import Stored
from accel.lowering.onnx.writer.builder import Builder, Param, finished, small
from accel.lowering.onnx.writer.fallback import lower_node
from accel.lowering.onnx.writer.table import lower

from . import aten_layout, aten_values
from .aten_case import SIZES, B, Call, Exported, In, Lowered, T, Weight, bools, ints

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
        (call(aten.repeat_interleave.self_int, HEADS, 3, 1), ["Unsqueeze", "Expand", "Reshape"]),
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
    with pytest.raises(
        LoweringError, match=r"aten.bernoulli.default \(node bernoulli_default, from model"
    ):
        lower_node(Builder(lambda *_: onnx.TensorProto()), node, ("x",), {})


@pytest.mark.parametrize(
    "case",
    [
        Call(aten.sort.default, In(), -1),
        Call(aten.topk.default, In(), 1),
        Call(aten.gather.default, In(), 0, ints(low=0, high=0)),
        Call(aten.index_select.default, In(), 0, ints(1, low=0, high=0)),
        Call(aten.scatter.value, In(), 0, ints(low=0, high=0), 1.0),
        Call(aten.softmax.int, In(), 0),
    ],
    ids=identifier,
)
def test_a_scalar_has_no_axis(case: Call) -> None:
    with pytest.raises(LoweringError, match=r"of a tensor of rank 0 \(node .*x\[None\]"):
        Lowered(case)


# Exported modules


class Rotary(nn.Module):
    """Llama's idioms: RMS norm by hand, rotated halves, repeated KV heads, a mask of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (16, 8, 8))
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequency", 0.5 ** torch.arange(2))

    def rotated(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * angle.cos() + turned * angle.sin()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        x = self.embed(ids)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        at = torch.arange(length)
        angle = torch.outer(at.float(), self.frequency).repeat(1, 2)
        q, k, v = (
            f(normed).view(rows, length, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        k, v = (
            y[:, :, None].expand(rows, 2, 2, length, 4).reshape(rows, 4, length, 4)
            for y in (self.rotated(k, angle), v)
        )
        scores = self.rotated(q, angle) @ k.transpose(2, 3) * 4**-0.5
        scores = scores.masked_fill(at[None, :] > at[:, None], torch.finfo(x.dtype).min)
        mixed = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v
        x = x + mixed.transpose(1, 2).contiguous().view(rows, length, 16)
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(x[:, -1:])


class Biased(nn.Module):
    """T5's bucketed distances and ALiBi's slopes, a mask buffer cut to size, a split projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(40, 16), nn.Embedding(8, 4)
        self.qkv, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)
        self.register_buffer("seen", torch.tril(torch.ones(99, 99, dtype=torch.bool))[None, None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        x = self.norm(self.embed(ids))
        parts = self.qkv(x).split(16, dim=-1)
        q, k, v = (y.reshape(rows, length, 4, 4).permute(0, 2, 1, 3) for y in parts)
        at = torch.arange(length)
        far = (at[:, None] - at[None]).clamp(min=0)
        large = 4 + (torch.log(far.float().clamp(min=1) / 4) / 2 * 4).long()
        bucket = torch.where(far < 4, far, torch.minimum(large, torch.full_like(large, 7)))
        slopes = 2.0 ** -torch.arange(1, 5)
        bias = self.bias(bucket).permute(2, 0, 1) - slopes[:, None, None] * far
        scores = torch.baddbmm(
            bias.repeat(rows, 1, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=0.5
        ).view(rows, 4, length, length)
        scores = torch.where(self.seen[:, :, :length, :length], scores, -1e9)
        mixed = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).reshape(rows, length, -1)
        return nn.functional.gelu(mixed, approximate="tanh") + x.new_ones(length, 16).cumsum(0)


class Routed(nn.Module):
    """Experts without loops, after a causal depthwise convolution and an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(40, 16), nn.Linear(16, 4)
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.conv(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2).contiguous()
        x[:, 0] = 0
        flat = x.view(-1, 16)
        weight, chosen = self.router(flat).sigmoid().topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        dense = torch.zeros_like(self.router(flat)).scatter_(1, chosen, weight)
        every = torch.einsum("nd,edf->nef", flat, self.experts)
        some = torch.matmul(flat[:, None, None], self.experts[chosen]).squeeze(2)
        both = (every * dense[..., None]).sum(1) + (some * weight[..., None]).sum(dim=1)
        return both.view(x.shape) + x.std(-1, keepdim=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("module", [Rotary, Biased, Routed])
def test_exported(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = module().eval()
    rows, length = (torch.export.Dim(n, min=1, max=64) for n in ("rows", "length"))
    ids = torch.randint(0, 40, (3, 5))
    shapes = ({0: rows, 1: length},)
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=shapes).run_decompositions({})
    session = Exported(program)
    for sizes in ((3, 5), (1, 1), (2, 13)):
        ids = torch.randint(0, 40, sizes)
        with torch.no_grad():
            torch.testing.assert_close(session.run(ids), model(ids), rtol=2e-6, atol=2e-6)


# Builder


def builder() -> Builder:
    def write(name: str, stored: Stored) -> onnx.TensorProto:
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


def test_a_parameter_that_is_lost_on_the_way_is_found_before_it_is_written() -> None:
    """A rule that makes a plain string of it; as it is, it is the control."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3])
    weight = Param("weight", torch.ones(3))
    for given, right in ((weight, True), (str(weight), False)):
        b = builder()
        out = b.node("Mul", "x", given)
        y = onnx.helper.make_tensor_value_info(out, onnx.TensorProto.FLOAT, [3])
        with nullcontext() if right else pytest.raises(LoweringError, match="reads 'weight'"):
            finished(b, "step", [x], [y])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8])
def test_constants_of_every_dtype(dtype: torch.dtype) -> None:
    b = builder()
    b.constant(torch.tensor([1, 0, 1], dtype=dtype))
    (made,) = b.initializers
    assert onnx.numpy_helper.to_array(made).astype("float32").tolist() == [1, 0, 1]


def test_a_constant_of_one_element_may_have_any_stride():
    odd = torch.arange(6.0).view(2, 3)[:1, 1].expand(1).as_strided((1,), (3,), 1)
    assert small("x", odd).raw_data == torch.tensor([1.0]).numpy().tobytes()
