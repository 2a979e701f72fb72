"""The pipeline: its text, its order, its rules, and that a miscompile in any pass is caught and named."""

from collections import Counter
from dataclasses import dataclass

import models
import pytest
import torch
from torch import nn

from accel import PassError
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.ops.attention import attention
from accel.ir.program import Editor, Program, State
from accel.ir.region import Region
from accel.ir.state import Part
from accel.passes import Pass, Report, run
from accel.passes.check import NumericCheck
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.linear import Linears
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.rope import Rope
from accel.passes.state.layers import signature

aten = torch.ops.aten


# Text


def test_the_whole_pipeline_as_text(captured, golden):
    program = captured("llama")
    run(program, pipeline())
    golden.check("llama", program.text())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "plain_softmax"])
def test_what_each_pass_replaces(captured, golden, name):
    """One line a pass: how many calls of which operator went and came."""
    program = captured(name)
    before, lines = operators(program), []

    def watch(step, line, program):
        nonlocal before
        now = operators(program)
        changes = [
            f"{k} {now[k] - before[k]:+d}" for k in sorted({*now, *before}) if now[k] != before[k]
        ]
        lines.append(f"{line.name} {line.changed}: {', '.join(changes) or '-'}")
        before = now

    run(program, pipeline(), None, watch)
    golden.check(f"{name}_passes", "\n".join(lines) + "\n")


def operators(program: Program) -> Counter:
    """Operator -> how many calls of it, in every graph."""
    return Counter(operator_name(n.target) for n in program.nodes())


def operator_name(target) -> str:
    if isinstance(target, Region):
        return "layer"
    name = str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__
    return name.removeprefix("aten.").removesuffix(".default")


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


@dataclass(frozen=True)
class Alone(Quiet):
    alone = True


@dataclass(frozen=True)
class Wrong(Pass):
    """Halves the logits."""

    def run(self, program):
        outputs = program.step.output_nodes()
        editor = Editor(program, program.step.graph)
        with editor.graph.inserting_after(outputs["logits"]):
            outputs["logits"] = editor.call(torch.ops.aten.mul.Tensor, outputs["logits"], 0.5)
        program.step.set_outputs(outputs)
        return Report(changed=1)


class Checks(NumericCheck):
    """Counts what it checked."""

    def __call__(self, program, step):
        self.seen = [*getattr(self, "seen", []), type(step).__name__]
        return super().__call__(program, step)


def test_passes_are_checked_together_and_apart_only_to_find_the_wrong_one(captured):
    program = captured("tiny")
    check = Checks(program)
    run(program, pipeline(), check)
    assert check.seen == ["Residual"]
    program = captured("tiny")
    check = Checks(program)
    with pytest.raises(PassError, match="^Wrong changed what the program computes"):
        run(program, [Clean(), Wrong(), Fold(), Linears(), Quiet()], check)
    assert check.seen == ["Quiet", "Clean", "Wrong"]


def test_a_pass_that_stumbles_over_another_ones_fault_is_not_blamed(captured):
    program = captured("tiny")
    with pytest.raises(PassError, match="^Wrong changed what the program computes"):
        run(program, [Clean(), Wrong(), Nothing()], NumericCheck(program))
    program = captured("tiny")
    with pytest.raises(PassError, match="^Nothing changed nothing"):
        run(program, [Clean(), Quiet(), Nothing()], NumericCheck(program))


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
    assert steps[0].error is None, "what follows is checked together with it"
    assert steps[1].error is not None and steps[1].error < 1e-6
    steps = run(captured("tiny"), [Clean(), Alone()], check)
    assert steps[0].error is not None and steps[1].error is None, "what changed nothing is not"
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
    program.state.append(State(Part.KEYS, 9, "float32", ("B", 2, "C", 6)))


def lost_input(program):
    program.step.input("positions").target = "places"


def no_logits(program):
    program.step.outputs[0] = "scores"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forget_parameter, "reads parameter 'norm.weight', which does not exist"),
        (no_shape, "layer_norm has no shape"),
        (a_method, "relu is a call_method; only function"),
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


# Layers and weights


def regions(program):
    return [n.target.graph for n in program.step.graph.nodes if isinstance(n.target, Region)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_layers_are_found(build, name):
    built = build(name)
    program = built.compiled.program
    found = regions(program)
    assert len(found) == len(program.facts.layers) == models.LAYERS
    shapes = [signature(g) for g in found]
    different = 2 if name == "gemma2" else 1  # every second layer of Gemma-2 has a window
    assert len(set(shapes)) == different and shapes[0] == shapes[different]
    step = next(s for s in built.compiled.report["steps"] if s["name"] == "Layers")
    assert step["changed"] == models.LAYERS


def test_what_the_layers_carry(build):
    layers = build("gemma2").compiled.program.facts.layers
    assert [(x.attention, x.window) for x in layers] == [
        ("window", 6),
        ("causal", 0),
        ("window", 6),
    ]
    layers = build("mistral").compiled.program.facts.layers
    assert [(x.attention, x.window) for x in layers] == [("window", 7)] * models.LAYERS
    assert {(x.num_heads, x.num_kv_heads, x.head_dim) for x in layers} == {(3, 1, 12)}


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("qwen3", False)])
def test_tied_weights_are_stored_once(build, name, tied):
    built = build(name)
    unique = {p.data_ptr(): p.numel() for p in built.model.parameters()}
    names = {n for n, _ in built.model.named_parameters(remove_duplicate=False)}
    assert (len(names) > len(unique)) is tied
    program = built.compiled.program
    own = {n: t for n, t in program.params.items() if n in names or "{" in n}  # or packed
    assert sum(t.numel() for t in own.values()) == sum(unique.values())
    pages = 4096 * len(program.params)
    tables = sum(t.numel() * t.element_size() for n, t in program.params.items() if n not in own)
    size = (built.compiled.artifact.path / "weights.bin").stat().st_size
    assert size <= 4 * sum(unique.values()) + tables + pages
