"""Every operator of the dialect: schema, shapes, reference against another formulation, ONNX."""

import itertools
import math
from collections.abc import Callable
from operator import getitem
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from accel.ir.facts import Facts
from accel.ir.ops import attention, kv, norm, rope, rows
from accel.ir.ops.op import Op
from accel.ir.program import Editor, Program
from accel.ir.region import Entry
from accel.ir.weights import Weights
from accel.lowering.onnx.export import export, load_rules
from accel.lowering.onnx.native import is_native, register
from accel.lowering.onnx.writer.table import lower

from .op_cases import (
    CASES,
    LONGEST,
    SIZES,
    TRACE,
    Case,
    append,
    constant,
    gated,
    operators,
    pooled,
    turn,
)


def test_every_operator_has_a_case_and_a_lowering():
    assert {c.op.name for c in CASES.values()} == set(operators())
    load_rules()
    assert [n for n, op in operators().items() if op.default not in lower.rules] == []


# Schema and shapes


@pytest.mark.parametrize("name", CASES)
def test_schema_and_shapes(name):
    case = CASES[name]
    checks = ("test_schema", "test_faketensor")
    for sizes in SIZES:
        operands = case.operands(sizes)
        torch.library.opcheck(case.op.default, tuple(operands), test_utils=checks)
        assert_close(case.op(*operands), case.op.reference(*operands), 0.0)


def test_a_wrong_shape_function_is_caught():
    op = Op(
        "wrong_shape_for_a_test",
        "(Tensor x) -> Tensor",
        reference=lambda x: x.flip(0) + 1,
        shape=lambda x: x.new_empty((*x.shape, 1)),
    )
    with pytest.raises(Exception, match="(?s)test_faketensor"):
        torch.library.opcheck(op.default, (torch.ones(3),), test_utils=("test_faketensor",))


# ONNX


def program_of(case: Case) -> Program:
    """A program of one node, traced with symbolic B, T and C."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    start = graph.placeholder("unused")
    start.meta["val"] = mode.from_tensor(torch.zeros(2, 3), static_shapes=True)
    program = Program(Weights(), {"step": Entry(graph, [])}, Facts(case.name, 1, LONGEST))
    editor = Editor(program, graph)
    args: list[Any] = []
    for i, value in enumerate(case.operands(TRACE)):
        if not isinstance(value, Tensor):
            args.append(value)
        elif i in case.fixed:
            args.append(editor.param(f"p{i}", value))
        else:
            args.append(symbolic(mode, graph.placeholder(f"x{i}"), value))
    out = editor.call(case.op.default, *args)
    many = isinstance(out.meta["val"], tuple)
    outs = [editor.call(getitem, out, i) for i in range(len(out.meta["val"]))] if many else [out]
    graph.output(tuple(outs))
    graph.erase_node(start)
    program.entries["step"].outputs = [f"out{i}" for i in range(len(outs))]
    for node in graph.find_nodes(op="placeholder"):
        for size in node.meta["val"].shape:
            program.dims.setdefault(str(size), f"n{len(program.dims)}")
    return program


def symbolic(mode: FakeTensorMode, node: fx.Node, value: Tensor) -> fx.Node:
    """An input of that value's shape; sizes that move are symbols, equal sizes the same one."""
    moves = [d in (*TRACE, TRACE[1] - 1) for d in value.shape]
    kinds = [DimDynamic.DUCK if m else DimDynamic.STATIC for m in moves]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    node.meta["val"] = mode.from_tensor(value, symbolic_context=context)
    return node


def onnx_session(case: Case, folder, file: str = "step.onnx") -> Callable[[list[Any]], Any]:
    export(program_of(case), folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if is_native(folder / file):
        register(options)
    session = onnxruntime.InferenceSession(str(folder / file), options)
    names = [i.name for i in session.get_inputs()]

    def run(operands: list[Any]) -> Any:
        out = session.run(None, {n: operands[int(n[1:])].numpy() for n in names})
        found = tuple(torch.from_numpy(array) for array in out)
        return found if len(found) > 1 else found[0]

    return run


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_onnx_equals_the_reference(name, tmp_path):
    case = CASES[name]
    run = onnx_session(case, tmp_path)
    for sizes in SIZES:
        operands = case.operands(sizes)
        assert_close(run(operands), case.op.reference(*operands))


@pytest.mark.parametrize(
    "name", ["attention-causal-4over2", "rope-10-halves", "rms_norm", "gate-silu"]
)
def test_a_token_that_is_not_a_number_spoils_itself_only(name, tmp_path):
    case = CASES[name]
    run = onnx_session(case, tmp_path)
    operands = case.operands((2, 4, 9))
    operands[0][0, ..., 1, :] = float("nan")
    for out in (case.op.reference(*operands), run(operands)):
        spoilt = out.isnan().flatten(2).any(-1) if out.dim() == 3 else out.isnan().any(1).any(-1)
        assert spoilt.nonzero().tolist() == [[0, 1]]


def test_a_wrong_lowering_is_caught(monkeypatch, tmp_path):
    case = CASES["attention-window4-4over2"]
    right = lower.rules[case.op.default]
    wrong = lambda b, *args: right(b, *args[:-1], args[-1] + 1)  # noqa: E731
    monkeypatch.setitem(lower.rules, case.op.default, wrong)
    with pytest.raises(AssertionError, match="not close"):
        test_onnx_equals_the_reference(case.name, tmp_path)


# References against another formulation

PARTS = ("kept", "pages", "beside")
WHOLE = [n for n in CASES if n.startswith("attention-") and not any(p in n for p in PARTS)]


def sees(mask: str, size: int, q: int, k: int, ahead: bool = False) -> bool:
    if k < 0:
        return False
    return {
        "causal": ahead or k <= q,
        "window": (ahead or k <= q) and q - k < size,
        "chunk": (ahead or k <= q) and max(q, 0) // max(size, 1) == k // max(size, 1),
        "full": True,
    }[mask]


def in_call(mask, size, q_pos, k_pos, tree, first, b: int, t: int, slot: int) -> bool:
    """Whether token t sees a slot: of the call's own, as a tree says, those at later positions too."""
    own = -1 if first is None else slot - int(first[b])
    there = tree is not None and 0 <= own < tree.shape[2]
    if there and not tree[b, t, own]:
        return False
    return sees(mask, size, int(q_pos[b, t]), int(k_pos[b, slot]), there)


def by_loops(q, k, v, q_pos, k_pos, bias, scale, cap, mask, size, sink=None, *more) -> Tensor:
    """Query by query over the keys that it sees; NaN where it sees none."""
    tree, first = more[3:] or (None, None)
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=torch.float64)
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        group, here = h * k.shape[1] // q.shape[1], int(q_pos[b, t])
        seen = [
            c for c in range(k.shape[2])
            if in_call(mask, size, q_pos, k_pos, tree, first, b, t, c)
        ]  # fmt: skip
        if here < 0 or not seen:
            continue
        weights = []
        for c in seen:
            there = int(k_pos[b, c])
            score = float(q[b, h, t].double() @ k[b, group, c].double()) * scale
            score = math.tanh(score / cap) * cap if cap else score
            if bias is not None and bias.dim() == 3:
                score += float(bias[h, here, there])
            elif bias is not None:
                score += float(bias[h, min(max(here - there, 0), bias.shape[1] - 1)])
            weights.append(score)
        weights = torch.tensor(weights, dtype=torch.float64).exp()
        share = weights.sum() + (0 if sink is None else sink[h].double().exp())
        out[b, h, t] = weights @ v[b, group, seen].double() / share
    return out.float()


@pytest.mark.parametrize("name", WHOLE)
def test_attention_equals_loops_over_what_each_query_sees(name):
    compared = 0
    for sizes in SIZES:
        operands = CASES[name].operands(sizes)
        got, want = attention.attention(*operands), by_loops(*operands)
        assert torch.isfinite(got).all(), "a row that sees nothing stays finite"
        known = ~want.isnan()
        assert_close(got[known], want[known])
        compared += int(known.sum())
    assert compared > 100


@pytest.mark.parametrize("name", WHOLE)
def test_attention_equals_torchs(name):
    operands = CASES[name].operands((2, 4, 9))
    q, k, v, q_pos, k_pos, bias, scale, cap, mask, size, *more = operands
    if cap:
        pytest.skip("torch's has no soft cap")
    allowed = [
        [
            [
                in_call(mask, size, q_pos, k_pos, *(more[4:] or (None, None)), i, t, c)
                for c in range(k_pos.shape[1])
            ]
            for t in range(q_pos.shape[1])
        ]
        for i in range(2)
    ]
    added = torch.zeros(2, q.shape[1], 4, 9).masked_fill(~torch.tensor(allowed)[:, None], -math.inf)
    for i, h, t, c in itertools.product(range(2), range(q.shape[1]), range(4), range(9)):
        here, there = max(int(q_pos[i, t]), 0), max(int(k_pos[i, c]), 0)
        if bias is not None and bias.dim() == 3:
            added[i, h, t, c] += bias[h, here, there]
        elif bias is not None:
            added[i, h, t, c] += bias[h, min(max(here - there, 0), bias.shape[1] - 1)]
    for score in (x for x in more[:1] if x is not None):  # a last key and value of zeros
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added = torch.cat([added, score[:, None, None].expand(2, -1, 4, 1)], dim=-1)
    want = F.scaled_dot_product_attention(q, k, v, added, scale=scale, enable_gqa=True)
    got = attention.attention(*operands)
    known = torch.tensor(allowed).any(-1)[:, None, :, None]
    assert_close(got[known.expand_as(got)], want[known.expand_as(want)])


def test_attention_does_not_depend_on_the_order_of_slots():
    operands = CASES["attention-window4-4over2"].operands((2, 4, 9))
    q, k, v, q_pos, k_pos, *rest = operands
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    moved = attention.attention(q, k[:, :, order], v[:, :, order], q_pos, k_pos[:, order], *rest)
    assert_close(moved, attention.attention(*operands))
    other = attention.attention(q, k[:, :, order], v[:, :, order], q_pos, k_pos, *rest)
    assert not torch.allclose(other, moved, atol=1e-3)


@pytest.mark.parametrize("rotated", [10, 4])
def test_rope_equals_transformers(rotated):
    x, positions, cos, sin, _ = turn(rotated, False)(2, 5, 0, np.random.default_rng(1))
    at = positions.clamp(min=0)
    wide = [torch.cat([t[at], t[at]], dim=-1) for t in (cos, sin)]
    turned, _ = apply_rotary_pos_emb(x[..., :rotated], x[..., :rotated], *wide)
    want = torch.cat([turned, x[..., rotated:]], dim=-1)
    assert_close(rope.rope(x, positions, cos, sin, False), want)
    assert not torch.allclose(rope.rope(x, positions, cos, sin, True), want, atol=1e-2)


@pytest.mark.parametrize("rotated", [10, 4])
def test_interleaved_rope_is_a_complex_product(rotated):
    x, positions, cos, sin, _ = turn(rotated, True)(2, 5, 0, np.random.default_rng(1))
    pairs = torch.view_as_complex(x[..., :rotated].unflatten(-1, (-1, 2)).contiguous())
    angle = torch.complex(cos, sin)[positions.clamp(min=0)][:, None]
    want = torch.cat([torch.view_as_real(pairs * angle).flatten(-2), x[..., rotated:]], dim=-1)
    assert_close(rope.rope(x, positions, cos, sin, True), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_equals_torchs(dtype):
    x, weight = constant(3, 5, 36).to(dtype), constant(36).to(dtype)
    got = norm.rms_norm(x, weight, 1e-3)
    want = F.rms_norm(x.float(), (36,), weight.float(), 1e-3)
    assert got.dtype == dtype
    assert_close(got.float(), want, 2e-5 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("act", norm.ACTIVATIONS)
def test_gate_equals_transformers(act):
    theirs = "gelu_pytorch_tanh" if act == "gelu_tanh" else act
    gate, up, _ = gated(act)(2, 5, 0, np.random.default_rng(3))
    assert_close(norm.gate(gate, up, act), ACT2FN[theirs](gate) * up)
    assert not torch.allclose(norm.gate(gate, up, act), ACT2FN[theirs](up) * gate, atol=1e-2)


@pytest.mark.parametrize("inner", [(), (2, 6)])
def test_kv_append_equals_a_loop(inner):
    buffer, new, slots = append(*inner)(3, 4, 11, np.random.default_rng(2))
    before, want = buffer.clone(), buffer.clone()
    for b, t in itertools.product(range(3), range(4)):
        if inner:
            want[b, :, slots[b] + t] = new[b, :, t]
        else:
            want[b, slots[b] + t] = new[b, t]
    assert torch.equal(kv.kv_append(buffer, new, slots), want)
    assert torch.equal(buffer, before), "the reference does not write in place"


def test_blocks_equal_a_loop():
    pool, table = pooled(5)(2, 4, 6, np.random.default_rng(0))
    table[0, 1] = -1
    found, where = kv.gather_blocks(pool, table), kv.block_positions(table, 2, 3)
    for b, m in itertools.product(range(2), range(4)):
        there = int(table[b, m]) >= 0
        for e in range(3):
            assert (where[b, :, 3 * m + e] == (3 * m + e if there else -1)).all()
            if there:
                assert torch.equal(found[b, :, 3 * m + e], pool[table[b, m], :, e])


def test_lookup_and_take_rows_equal_indexing():
    table, positions = constant(LONGEST, 7), torch.tensor([[0, 5, -1], [23, 1, -1]])
    want = torch.stack([torch.stack([table[max(int(p), 0)] for p in row]) for row in positions])
    assert torch.equal(rows.lookup(table, positions), want)
    x, picked = constant(2, 5, 6), torch.tensor([[4, 0, 0], [1, 2, 1]])
    want = torch.stack([torch.stack([x[b, i] for i in row]) for b, row in enumerate(picked)])
    assert torch.equal(rows.take_rows(x, picked), want)
