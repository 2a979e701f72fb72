"""The pipeline: its text, its order, its rules, and that a miscompile in any pass is caught and named."""

import copy
import dataclasses
from collections import Counter
from dataclasses import dataclass

import models
import pytest
import torch
from torch import nn

from accel import PassError
from accel.ir.capture import capture
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import kv_append
from accel.ir.ops.norm import gate, rms_norm
from accel.ir.ops.rope import rope
from accel.ir.ops.rows import lookup, take_rows
from accel.ir.program import Editor, Entry, Program, Region, State
from accel.passes import Pass, Report, run
from accel.passes.check import NumericCheck
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.clean.linear import Linears
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.gate import Activations, Gates
from accel.passes.recognise.layers import Layers, signature
from accel.passes.recognise.norm import Norms
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.rope import Rope
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.weights.float16 import Float16
from accel.runtime.optimize import pipeline

aten = torch.ops.aten


def clone(program: Program) -> Program:
    """A copy whose graphs and facts are its own; parameters are shared."""
    return Program(
        dict(program.params),
        {n: Entry(copy.deepcopy(e.graph), list(e.outputs)) for n, e in program.entries.items()},
        copy.deepcopy(program.facts),
        list(program.state),
        dict(program.dims),
    )


@pytest.fixture(scope="module")
def captured():
    """captured(architecture) -> a fresh copy of its captured program, of two layers."""
    made = {}

    def get(name: str) -> Program:
        if name not in made:
            layers, models.LAYERS = models.LAYERS, 2
            try:
                made[name] = capture(MODELS[name](), max_context=128)
            finally:
                models.LAYERS = layers
        return clone(made[name])

    return get


def tiny() -> nn.Module:
    return models.randomise(models.PlainSdpa(vocab=31, width=12, heads=2, layers=1), "tiny")


MODELS = {**models.ARCHITECTURES, "tiny": tiny}


# Text


def test_the_whole_pipeline_as_text(captured, golden):
    program = captured("llama")
    run(program, pipeline())
    golden.check("llama", program.text())


@pytest.mark.parametrize("name", ["llama", "gpt2", "plain_softmax"])
def test_what_each_pass_replaces(captured, golden, name):
    """One line a pass: how many calls of which operator went and came."""
    program = captured(name)
    counts = Counter(str(n.target) for n in program.nodes())
    lines = []

    def watch(step, line, program):
        nonlocal counts
        now = Counter(getattr(n.target, "name", str(n.target)) for n in program.nodes())
        now = Counter({k() if callable(k) else k: v for k, v in now.items()})
        changes = {k: now[k] - counts[k] for k in sorted({*now, *counts}) if now[k] != counts[k]}
        lines.append(
            f"{line.name} {line.changed}: " + ", ".join(f"{k} {v:+d}" for k, v in changes.items())
        )
        counts = now

    run(program, pipeline(), None, watch)
    golden.check(f"{name}_passes", "\n".join(lines) + "\n")


def test_layers_that_differ_are_written_out(captured):
    """A different number in one layer is no layer number."""
    program = captured("llama")
    run(program, pipeline())
    assert "layer.1: as layer.0" in program.text()
    (node,) = regions(program)[1].find_nodes(op="call_function", target=attention.default)
    node.update_arg(6, node.args[6] * 1.5)
    assert "as layer.0" not in program.text() and "layer.1(x: " in program.text()


def test_text_does_not_depend_on_the_run(captured):
    texts = []
    for _ in range(2):
        program = captured("llama")
        run(program, pipeline())
        texts.append(program.text())
    assert texts[0] == texts[1]


# Order


@dataclass(frozen=True)
class Nothing(Pass):
    must_change = True

    def run(self, program):
        return Report(0, ["mul_3: the weight has 2 axes, not 1", "mul_9: another"])


@dataclass(frozen=True)
class Quiet(Pass):
    def run(self, program):
        return Report()


def test_an_order_that_is_violated_is_refused(captured):
    with pytest.raises(PassError, match="^Rope runs after Attention; move it down the recipe$"):
        run(captured("tiny"), [Clean(), Rope()])
    with pytest.raises(PassError, match="^Attention runs after Positions"):
        run(captured("tiny"), [Clean(), Fold(), Attention(), Positions()])


def test_the_pipeline_is_in_order():
    done = set()
    for step in pipeline():
        assert set(step.after) <= done, type(step).__name__
        done.add(type(step))


def test_finding_nothing_says_what_came_nearest(captured):
    with pytest.raises(
        PassError, match="^Nothing changed nothing. Nearest miss: mul_3: the weight"
    ):
        run(captured("tiny"), [Nothing()])
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    with pytest.raises(PassError, match="Attention changed nothing. Nearest miss: no candidate"):
        run(capture(model), pipeline())


def test_the_report_of_a_run(captured):
    seen = []
    program = captured("tiny")
    check = NumericCheck(program)
    steps = run(program, [Clean(), Quiet()], check, lambda *a: seen.append(a))
    assert [s.name for s in steps] == ["Clean", "Quiet"] and steps[0].changed > 0
    assert steps[0].error is not None and steps[0].error < 1e-6
    assert steps[1].error is None, "what changed nothing is not checked"
    assert [type(p).__name__ for p, _, _ in seen] == ["Clean", "Quiet"]
    assert all(p is program for _, _, p in seen)


# Rules


def breaking(change):
    """A pass that breaks a rule."""

    @dataclass(frozen=True)
    class Breaking(Pass):
        def run(self, program):
            change(program)
            return Report(1)

    return Breaking()


def first(program, target):
    return next(n for g in program.graphs() for n in g.nodes if n.target is target)


def forget_parameter(program):
    del program.params["norm.weight"]


def no_shape(program):
    first(program, aten.layer_norm.default).meta.pop("val")


def a_method(program):
    node = first(program, aten.layer_norm.default)
    with program.step.graph.inserting_after(node):
        program.step.graph.call_method("relu", (node,)).meta["val"] = node.meta["val"]


def too_late(program):
    node = first(program, aten.embedding.default)
    list(program.step.graph.nodes)[-2].append(node)


def wrong_mask(program):
    first(program, attention.default).update_arg(8, "windo")


def wrong_heads(program):
    node = first(program, attention.default)
    graph = program.step.graph
    with graph.inserting_before(node):
        fewer = Editor(program, graph).call(aten.slice.Tensor, node.args[2], 1, 0, 1)
    node.update_arg(2, fewer)


def lost_state(program):
    program.state.append(State("kv.9.k", "k", 9, "float32", ("B", 2, "C", 6), 0))


def lost_input(program):
    program.step.input("positions").target = "places"


def no_logits(program):
    program.step.outputs[0] = "scores"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forget_parameter, "reads parameter 'norm.weight', which does not exist"),
        (no_shape, "layer_norm has no shape"),
        (a_method, "relu is a call_method; only functions"),
        (too_late, "reads embedding before it is computed"),
        (wrong_mask, "mask 'windo' is none of"),
        (wrong_heads, "2 query heads over 2 and 1 KV heads"),
        (lost_state, "state 'kv.9.k' is not both an input and an output 'kv.9.k.next'"),
        (lost_input, "step has no input 'positions'"),
        (no_logits, "step does not return logits"),
    ],
)
def test_a_broken_rule_is_named_with_the_pass_and_the_node(captured, change, said):
    passes = [Clean(), Fold(), Positions(), Attention(), breaking(change)]
    with pytest.raises(PassError, match="after Breaking the program is not valid: ") as caught:
        run(captured("tiny"), passes)
    assert said in str(caught.value)


def test_a_region_called_with_the_wrong_number_of_values(captured):
    def change(program):
        node = next(n for n in program.step.graph.nodes if isinstance(n.target, Region))
        node.args = node.args[:-1]

    with pytest.raises(PassError, match="passes .* values to a region of"):
        run(captured("tiny"), [*pipeline(), breaking(change)])


# Miscompiles


def change_argument(target, index, change):
    def spoil(program):
        node = first(program, target)
        node.update_arg(index, change(node.args[index]))

    return spoil


def change_parameter(target, index, change):
    def spoil(program):
        name = first(program, target).args[index].target
        program.params[name] = change(program.params[name])

    return spoil


def drop_residual(program):
    node = next(
        n
        for n in reversed(program.step.graph.nodes)
        if n.target is aten.add.Tensor and len(n.all_input_nodes) == 2 and n.meta["val"].dim() == 3
    )
    node.replace_all_uses_with(node.args[0])
    program.step.graph.erase_node(node)


def scale_folded(program):
    name = next(n for n in program.params if n.startswith("folded."))
    program.params[name] = program.params[name] * 1.01


def swap_state(program):
    """Keys are stored where values belong, and values where keys belong."""
    (a, b) = [
        n for n in program.nodes(kv_append.default) if n.args[0].target in ("kv.0.k", "kv.0.v")
    ]
    a_new, b_new = a.args[1], b.args[1]
    a.update_arg(1, b_new)
    b.update_arg(1, a_new)


def forget_positions(program):
    """The slots are taken to hold the tokens of this call, whatever lies in them."""
    state = next(s for s in program.state if s.name == "kv.pos")
    program.state[program.state.index(state)] = dataclasses.replace(state, fill=0)


def swap_arguments(program):
    node = next(n for n in program.step.graph.nodes if isinstance(n.target, Region))
    names = [p.target for p in node.target.graph.find_nodes(op="placeholder")]
    i, j = names.index("kv.0.k"), names.index("kv.0.v")
    args = list(node.args)
    args[i], args[j] = args[j], args[i]
    node.args = tuple(args)


def erf_for_tanh(program):
    node = first(program, aten.gelu.default)
    node.kwargs = {}


MISCOMPILES = {
    "a residual is dropped": ("llama", Clean, drop_residual),
    "a folded value is off by 1 %": ("llama", Fold, scale_folded),
    "a stored matrix is negated": ("gpt2", Linears, change_parameter(aten.linear.default, 1, torch.neg)),
    "positions are off by one": ("gpt2", Positions, change_parameter(lookup.default, 0, lambda t: t.roll(1, 0))),
    "eps is too large": ("llama", Norms, change_argument(rms_norm.default, 2, lambda e: 1e-3)),
    "a scale is off by 1 %": ("llama", Attention, change_argument(attention.default, 6, lambda s: s * 1.01)),
    "a mask hides the last key": ("llama", Attention, change_argument(attention.default, 8, lambda m: "chunk")),
    "a rotation turns the other way": ("llama", Rope, change_parameter(rope.default, 3, torch.neg)),
    "pairs for halves": ("llama", Rope, change_argument(rope.default, 4, lambda i: not i)),
    "erf for tanh": ("gpt2", Activations, erf_for_tanh),
    "gelu for silu": ("llama", Gates, change_argument(gate.default, 2, lambda a: "gelu")),
    "k and v are swapped": ("llama", Cache, swap_state),
    "empty slots are seen": ("llama", Cache, forget_positions),
    "the rows are off": ("llama", Head, change_argument(take_rows.default, 1, lambda r: r)),
    "arguments of a layer are swapped": ("llama", Layers, swap_arguments),
    "half weights are off": ("llama", Float16, lambda p: [t.mul_(1.2) for n, t in p.params.items() if n.endswith(".f16")]),
}  # fmt: skip


def other_rows(program):
    node = first(program, take_rows.default)
    with program.step.graph.inserting_before(node):
        new = Editor(program, program.step.graph).call(aten.mul.Tensor, node.args[1], 0)
    node.update_arg(1, new)


MISCOMPILES["the rows are off"] = ("llama", Head, other_rows)


def passes_up_to(kind):
    steps = [*pipeline(), Float16(smallest=64)]
    return steps[: [type(s) for s in steps].index(kind) + 1]


def test_every_pass_has_a_miscompile():
    spoilt = {kind for _, kind, _ in MISCOMPILES.values()}
    assert {type(s) for s in pipeline()} <= spoilt


@pytest.mark.parametrize("name", MISCOMPILES)
def test_a_miscompile_is_caught_and_the_pass_named(captured, monkeypatch, name):
    architecture, kind, spoil = MISCOMPILES[name]
    program = captured(architecture)
    if name == "a mask hides the last key":

        def spoil(program, spoil=spoil):
            spoil(program)
            first(program, attention.default).update_arg(9, 12)

    real = kind.run

    def wrong(self, program):
        report = real(self, program)
        spoil(program)
        return report

    monkeypatch.setattr(kind, "run", wrong)
    with pytest.raises(PassError, match=f"^{kind.__name__} changed what the program computes: .*e"):
        run(program, passes_up_to(kind), NumericCheck(program))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_without_a_miscompile_the_error_is_tiny(captured, architecture):
    program = captured(architecture)
    steps = run(program, [*pipeline(), Float16(smallest=64)], NumericCheck(program))
    assert max(s.error for s in steps[:-1] if s.error is not None) < 1e-5
    assert 1e-5 < steps[-1].error < Float16.error


# Layers and weights


def regions(program):
    return [n.target.graph for n in program.step.graph.nodes if isinstance(n.target, Region)]


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_layers_are_found(build, name):
    built = build(name)
    program = built.compiled.program
    found = regions(program)
    layers = 4 if name == "gemma2" else models.LAYERS
    assert len(found) == len(program.facts.layers) == layers
    shapes = [signature(g) for g in found]
    different = 2 if name == "gemma2" else 1  # every second layer of Gemma-2 has a window
    assert len(set(shapes)) == different and shapes[0] == shapes[different]
    step = next(s for s in built.compiled.report["steps"] if s["name"] == "Layers")
    assert step["changed"] == layers


def test_what_the_layers_carry(build):
    layers = build("gemma2").compiled.program.facts.layers
    assert [(x.attention, x.window) for x in layers] == [("window", 6), ("causal", 0)] * 2
    layers = build("mistral").compiled.program.facts.layers
    assert [(x.attention, x.window) for x in layers] == [("window", 7)] * models.LAYERS
    assert {(x.num_heads, x.num_kv_heads, x.head_dim) for x in layers} == {(3, 1, 12)}


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("opt", True), ("qwen3", False)])
def test_tied_weights_are_stored_once(build, name, tied):
    built = build(name)
    unique = {p.data_ptr(): p.numel() for p in built.model.parameters()}
    names = {n for n, _ in built.model.named_parameters(remove_duplicate=False)}
    assert (len(names) > len(unique)) is tied
    program = built.compiled.program
    own = {n: t for n, t in program.params.items() if n in names}
    assert sum(t.numel() for t in own.values()) == sum(unique.values())
    pages = 4096 * len(program.params)
    tables = sum(t.numel() * t.element_size() for n, t in program.params.items() if n not in names)
    size = (built.compiled.artifact.path / "weights.bin").stat().st_size
    assert size <= 4 * sum(unique.values()) + tables + pages
