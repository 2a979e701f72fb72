"""Fewer, larger operators: what is packed, what is left alone, and that nothing changes but the count."""

from functools import cache

import models
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accel
from accel.compiler.pipeline import pipeline
from accel.compiler.smoke.tiny_models import randomise
from accel.ir.capture.capture import capture
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import kv_append
from accel.ir.ops.norm import add_layer_norm, add_rms_norm, rms_norm
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor
from accel.ir.region import Region
from accel.ir.weights import Stored, Weights
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.fuse.pack import joined
from accel.passes.weights.float16 import Float16

aten = torch.ops.aten


def fused(program, *more):
    """The steps by name of a whole run, checked."""
    return {s.name: s for s in run(program, [*pipeline(), *more], NumericCheck(program))}


def linears(program):
    """Names of the weights of the layers' products."""
    return [str(n.args[1].target) for n in program.nodes(aten.linear.default)]


# Weights


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    width=st.integers(0, 4),
    half=st.booleans(),
    turned=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_stacked_parameters_are_their_rows_one_below_the_other(counts, width, half, turned):
    shape = (width,) if width else ()
    parts = [torch.randn(n, *shape) for n in counts]
    weights = Weights({str(i): p for i, p in enumerate(parts)})
    if half:
        weights = Weights(
            {str(i): Stored(p.half(), (torch.Tensor.float,)) for i, p in enumerate(parts)}
        )
        parts = [p.half().float() for p in parts]
    names = list(weights)
    weights.stack("all", [*names, torch.ones(2, *shape)])
    want = torch.cat([*parts, torch.ones(2, *shape)])
    assert torch.equal(weights["all"], want)
    blank = weights.blank("all")
    assert (blank.shape, blank.dtype) == (want.shape, want.dtype) and blank.is_meta
    if turned and width:
        weights.derive("turned", "all", torch.t)
        assert (
            torch.equal(weights["turned"], want.t())
            and weights.blank("turned").shape == want.t().shape
        )
    before = weights["all"]
    for name in names:
        del weights[name]
    assert torch.equal(weights["all"], before)


def test_parts_are_read_one_at_a_time(monkeypatch):
    alive, most, real = [0], [0], Stored.read

    def read(stored):
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        value = real(stored)
        alive[0] -= 1
        return value

    weights = Weights({c: torch.ones(3, 2) for c in "abcd"})
    weights.stack("all", list("abcd"))
    monkeypatch.setattr(Stored, "read", read)
    assert weights["all"].shape == (12, 2) and most[0] == 2  # the whole, and one part


def test_names_of_packed_weights():
    assert joined(["m.0.a.q.weight", "m.0.a.k.weight"]) == "m.0.a.{q,k}.weight"
    assert joined(["m.q", "m.k"]) == "m.{q,k}" and joined(["q", "k"]) == "{q,k}"
    assert joined(["m.a.q.w", "m.b.c.q.w"]) == "m.{a,b.c}.q.w"


# Packing


class Mixed(nn.Module):
    """A bias on some of the projections of one value; heads of two sizes; a projection used twice."""

    def __init__(self, width=24, heads=4, groups=2, size=6):
        super().__init__()
        self.embed, self.size = nn.Embedding(61, width), size
        self.q = nn.Linear(width, heads * size)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size)
        self.o = nn.Linear(heads * size, width, bias=False)
        self.twice = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 40, bias=False), nn.Linear(40, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 61)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (
            p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm(x)
        x = x + self.twice(y) + self.down(torch.relu(self.up(y)))
        return self.head(self.twice(x) + x)


def test_biases_on_some_projections():
    model = randomise(Mixed(), "mixed")
    program = capture(model, max_context=32)
    steps = fused(program)
    (name,) = [n for n in linears(program) if n.startswith("{q,k,v}")]
    assert torch.equal(
        program.params[name], torch.cat([model.q.weight, model.k.weight, model.v.weight])
    )
    bias = program.params[f"{name}.bias"]
    assert torch.equal(bias, torch.cat([model.q.bias, torch.zeros(12), model.v.bias]))
    assert not any("twice" in n and "{" in n for n in linears(program)), (
        "a weight that two places use"
    )
    assert any("twice.weight is used elsewhere too" in r for r in steps["Pack"].refused)
    assert max(s.error for s in steps.values() if s.error is not None) < 1e-5


@pytest.fixture(scope="module")
def rewritten(captured):
    """rewritten(name) -> its program after all passes, each checked, and the steps: to be read only."""

    @cache
    def get(name):
        program = captured(name)
        return (program, fused(program))

    return get


def layers(program):
    return [n.target.graph for n in program.step.graph.nodes if isinstance(n.target, Region)]


NAMES = ["llama", "qwen3", "phi3", "gpt2"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_products_of_a_layer(rewritten, name):
    """q, k and v in one, the output, the way up (gate and up in one), the way down."""
    for graph in layers(rewritten(name)[0]):
        targets = [n.target for n in graph.nodes]
        assert targets.count(aten.linear.default) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(1)
def test_heads_are_laid_out_once(rewritten, name):
    for graph in layers(rewritten(name)[0]):
        targets = [n.target for n in graph.nodes]
        assert targets.count(aten.reshape.default) == 2, "to heads, and back"
        assert targets.count(aten.transpose.int) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "tiny"])
def test_a_model_of_single_products_is_left_alone(rewritten, name):
    program, steps = rewritten(name)
    assert steps["Pack"].changed == 0 and not any("{" in n for n in linears(program))


def test_a_tied_head_is_left_with_the_reason():
    program = capture(models.random(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    ), max_context=32)  # fmt: skip
    (why,) = {s.name: s for s in run(program, pipeline())}["Pack"].refused
    assert "model.embed_tokens.weight is the embedding too (tied)" in why


@pytest.mark.long
def test_a_router_stays_apart(captured):
    program = captured("mixtral")
    steps = {s.name: s for s in run(program, pipeline())}
    assert any("belongs to a mixture of experts" in r for r in steps["Pack"].refused)
    routers = [n for n in linears(program) if n.endswith(".gate.weight")]
    assert len(routers) == 2 and any("{q_proj,k_proj,v_proj}" in n for n in linears(program))


def test_half_precision_narrows_what_is_packed(captured):
    program = captured("llama")
    fused(program, Float16(smallest=64))
    packed = [n.args[1] for n in program.nodes(aten.linear.default)]
    assert all(n.target is aten._to_copy.default for n in packed)
    names = [str(n.args[0].target) for n in packed]
    assert sum(n.endswith("{q_proj,k_proj,v_proj}.weight.f16") for n in names) == 2
    assert all(program.params.blank(n).dtype is torch.float16 for n in names)


def test_the_eager_target_reads_packed_weights():
    model = randomise(Mixed(), "mixed")
    tokens = torch.arange(9)[None]
    with accel.optimize(model, target="eager", max_context=32) as compiled:
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
    torch.testing.assert_close(got, model(tokens), atol=1e-4, rtol=1e-4)


# Norms


@pytest.mark.parametrize(
    ("name", "op"), [("llama", add_rms_norm), ("qwen3", add_rms_norm), ("gpt2", add_layer_norm)]
)
def test_a_norm_takes_the_sum_before_it(rewritten, name, op):
    program, steps = rewritten(name)
    assert steps["Residual"].changed == 2  # one a layer: the sum between layers stays one value
    for node in program.nodes(op.default):
        assert {n.args[1] for n in node.users} == {0, 1} and all(n.users for n in node.users)


def test_norms_of_parallel_branches_are_left_alone(rewritten):
    program, steps = rewritten("gpt_neox")  # both read the stream itself
    assert steps["Residual"].changed == 0 and len(program.nodes(aten.layer_norm.default)) == 5


# Only the rows that are asked for, and no copies of keys and values


def ahead_of_the_rows(program):
    """Operators between the last layer and take_rows, and those after it."""
    (taken,) = program.nodes(take_rows.default)
    order = list(program.step.graph.nodes)
    last = max(order.index(n) for n in order if isinstance(n.target, Region))
    between = [n for n in order[last + 1 : order.index(taken)] if n.op == "call_function"]
    return [n.target for n in between if n.target.__name__ != "getitem"], taken


@pytest.mark.parametrize("name", [*NAMES, "gpt_neox"])
def test_the_final_norm_is_after_the_rows(rewritten, name):
    between, taken = ahead_of_the_rows(rewritten(name)[0])
    assert between == []
    after = {n.target for n in taken.users}
    assert after <= {rms_norm.default, aten.layer_norm.default}


def copies_of_heads(program):
    """Keys or values of attention that do not come straight out of their buffer of G heads."""
    state = {s.name: s.shape for s in program.state}
    found = []
    assert program.nodes(attention.default)
    for node in program.nodes(attention.default):
        for value in node.args[1:3]:
            buffer = value.args[0] if value.target is kv_append.default else None
            if buffer is None or state[str(buffer.target)][1] != value.meta["val"].shape[1]:
                found.append(value.name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_are_not_repeated_for_their_queries(rewritten, name):
    program, _ = rewritten(name)
    assert copies_of_heads(program) == []


def test_repeated_keys_are_seen(captured):
    program = captured("llama")
    fused(program)
    (node, *_) = program.nodes(attention.default)
    with node.graph.inserting_before(node):
        editor = Editor(program, node.graph)
        wide = editor.call(aten.repeat_interleave.self_int, node.args[1], 2, 1)
    node.update_arg(1, wide)
    assert copies_of_heads(program) == [wide.name]


def test_the_written_graph_repeats_no_keys(build):
    built = build("llama")
    graph = onnx.load(built.compiled.artifact.path / "step.onnx", load_external_data=False).graph
    kinds = [n.op_type for n in graph.node]
    assert "Expand" not in kinds and kinds.count("Tile") == 1  # of the mask, once
    inner = [n for n in graph.node if n.output[0].startswith("layer.1/")]
    assert len(inner) <= 24 and sum(n.op_type == "MatMul" for n in inner) == 5
