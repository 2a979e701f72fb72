"""Kinds of entries: each has an example that its graphs are held to, and a graph that differs is refused."""

import models
import pytest
import torch
from matrix import random_part

import accel
from accel.compiler.over_state import over_state
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.capture.capture import capture
from accel.ir.entries import kind_of, kinds
from accel.ir.entries.prompt import part_of
from accel.ir.errors import Miscompiled
from accel.ir.prefill import Pick, Prefill
from accel.ir.program import Editor
from accel.lowering.onnx.rules.accel_ops import BLOCK
from accel.lowering.onnx.verify import entry_error
from accel.passes.prefill.prune.cache_augment import CacheAugment

from .kv_case import recipe
from .once import made_once
from .test_encoder_decoder import make
from .tree_case import with_trees

SPARSE = {"use": "critiprefill", "segment": 8, "block": 4, "budget": 8, "threshold": 16, "first": 1}
CLUSTERS = {"use": "clusterkv", "tokens_read": 10, "size": 4, "every": 8, "sinks": 2, "rounds": 2}
LOW_RANK = {
    "use": "shadowkv",
    "tokens_read": 8,
    "page": 4,
    "outliers": 1,
    "low_rank": 6,
    "dense_layers": 0,
}
PRUNED = {"use": "promptdistill", "tokens": 12, "layer": 0}
BUILDS = {  # entries -> architecture, recipe
    "step, genai": ("llama", {}),
    "encode": ("t5", {}),
    "compress": ("llama", recipe("snapkv")),
    "compress of blocks": ("llama", {"kv.codec": {"use": "kivi", "residual": 32, "group": 8}}),
    "filter": ("llama", {"prefill.prune": {"use": "gemfilter", "tokens": 12, "layer": 1}}),
    "prompt": ("llama", {"prefill.prune": PRUNED}),
    "fill": ("llama", {"prefill.prune": {"use": "yoco", "layers": 0}}),
    "sparse": ("llama", {"prefill.sparse": SPARSE}),
    "rank, attend": ("gemma2", {"prefill.ranks": {"use": "cp-ring"}}),
    "group": ("llama", {"kv.select": {**CLUSTERS, "dense_layers": 0}}),
    "squares, factor": ("llama", {"kv.select": LOW_RANK}),
    "commit": ("llama", {"kv.codec": {"use": "kv-int8"}}),
    "flat": ("llama", {"batch": {"use": "flat"}}),
    "shift": ("llama", {"kv.reuse": {"use": "pie"}}),
    "blend": ("llama", {"kv.reuse": {"use": "kvshare"}}),
    "embed": ("llama", {"loop": {"use": "superposed"}}),
    "replay": ("xlstm", {"draft": {"use": "prompt-lookup"}}),
    "exit": ("llama", {"draft": {"use": "del-exit"}}),
    "skips": ("llama", {"draft": {"use": "clasp"}}),
    "augment": ("llama", {"prefill.prune": {"use": "cache-augment"}}),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """What was written for some entries."""

    def get(name):
        architecture, tables = BUILDS[name]
        maker = {"encode": make, "replay": small_model}.get(name)
        model = maker(architecture) if maker else models.ARCHITECTURES[architecture]()
        optimize = with_trees if name == "commit" else accel.optimize
        out = tmp_path_factory.mktemp("entries") / "artifact"
        if name == "augment":
            file = out.with_name("coprocessor.safetensors")
            random_part(over_state(capture(model, max_context=64)), CacheAugment, file)
            tables = {axis: {**table, "trained": str(file)} for axis, table in tables.items()}
        return optimize(model, {**tables}, max_context=64, out=out)

    with made_once(get) as found:
        yield found


def entries_of(model):
    return {n: k for n in model.program.entries if (k := kind_of(n)) is not None}


def files(model, name):
    return [model.artifact.path / f for f in model.artifact.entries[name].graphs.values()]


@pytest.mark.long
def test_every_kind_is_built_here(build):
    found = {kind.name for name in BUILDS for kind in entries_of(build(name)).values()}
    assert found == set(kinds())


@pytest.mark.few(1)
@pytest.mark.parametrize("built", BUILDS)
def test_an_example_is_what_the_entry_takes(build, built):
    program = build(built).program
    for name, kind in entries_of(build(built)).items():
        entry, given = program.entries[name], kind.example(program, name)
        assert set(entry.inputs) - set(entry.defaults) <= set(given) <= set(entry.inputs)
        for key, value in kind.example(program, name).items():
            assert value.equal(given[key]), "the same at each call"
        assert list(program.run(name, given)) == entry.outputs


@pytest.mark.few(1)
@pytest.mark.parametrize("built", BUILDS)
def test_a_graph_that_gives_something_else_is_refused(build, built):
    model, program = build(built), build(built).program.copy()
    for name, kind in entries_of(model).items():
        if kind.error is None or name == "step":
            continue
        assert entry_error(program, name, files(model, name)) <= max(kind.error, 0.1)
        entry = program.entries[name]
        outputs = entry.output_nodes()
        for changed in outputs:
            with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
                editor = Editor(program, entry.graph)
                off = editor.call(torch.ops.aten.mul.Scalar, outputs[changed], -3)
            entry.set_outputs({**outputs, changed: off})
            with pytest.raises(Miscompiled, match="differs from the model"):
                entry_error(program, name, files(model, name))
        entry.set_outputs(outputs)


def test_a_step_is_held_to_the_logits_of_the_module(build):
    model, tokens = build("step, genai"), torch.arange(8)[None]
    given = {"tokens": tokens, "positions": tokens, "slots": torch.zeros(1).long(), "rows": tokens}
    state = {s.name: s.allocate(B=1, C=8) for s in model.program.state}
    want = model.program.run("step", {**given, **state})["logits"]
    assert entry_error(model.program, "step", files(model, "step"), [(tokens, want)]) < 1e-5
    with pytest.raises(Miscompiled, match="step.onnx, run by onnxruntime"):
        entry_error(model.program, "step", files(model, "step"), [(tokens, want + 1)])


def test_entries_of_a_prompt_go_by_its_plan(build):
    facts = build("step, genai").facts
    facts = type(facts)("name", 10, 64, prefill=Prefill(stages=(Pick(1, 0, 0), Pick(1, 0, 0))))
    assert list(kinds()["prompt"].names(facts)) == [part_of(0), part_of(1), part_of(2)]
    assert not kinds()["filter"].names(facts) and not kinds()["sparse"].names(facts)
    assert kind_of(part_of(2)) is kinds()["prompt"] and kind_of("unheard") is None


def test_examples_have_slots_that_kernels_take():
    from accel.ir.entries._values import SLOTS

    assert SLOTS % BLOCK == 0
