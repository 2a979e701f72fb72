"""The depth methods, each by what it promises, and their conditions in ONNX."""

import copy
import re
from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch

import accel
from accel.ir.errors import Miscompiled, PassError, RecipeError
from accel.lowering.onnx import export
from accel.lowering.onnx.writer import branch
from accel.passes.depth import shortgpt
from accel.passes.depth.unified_skip import evenly

from .depth_case import LAYERS, NEVER, TOKENS, far, oracle, plan

# unified-skip


@pytest.mark.parametrize(
    ("count", "speedup", "kept"),
    [
        (30, 5, [0, 6, 12, 18, 24, 29]),
        (30, 10, [0, 15, 29]),
        (32, 4, [0, 4, 8, 12, 16, 20, 24, 31]),
        (24, 3, [0, 3, 6, 9, 12, 15, 18, 23]),
    ],
)
def test_the_plans_are_those_of_the_paper(count, speedup, kept):
    assert [i for i, run in enumerate(evenly(count, count // speedup)) if run] == kept


def test_exactly_as_many_layers_run_as_are_to_be_kept():
    for count in range(2, 70):
        for kept in range(2, count + 1):
            assert sum(evenly(count, kept)) == kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"use": "unified-skip", "speedup": 0.5},
            "depth.unified-skip: speedup is 0.5; give at least 1",
        ),
        ({"use": "unified-skip", "cache": "nest"}, "did you mean 'nested'"),
        ({"use": "calm", "threshold": -0.1}, "depth.calm: threshold is -0.1; give at least 0"),
        (
            {"use": "calm", "agreement": 0.0},
            "depth.calm: agreement is 0.0; give more than 0 and less than 1",
        ),
        ({"use": "calm", "every": 0}, "depth.calm: every is 0; give at least 1"),
        (
            {"use": "shortgpt", "share": 1.0},
            "depth.shortgpt: share is 1.0; give at least 0 and less than 1",
        ),
        ({"use": "shortgpt", "tokens": 0}, "depth.shortgpt: tokens is 0; give at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        accel.optimize("/nowhere", {"depth": options})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use": "unified-skip", "speedup": 3.0}, "give a speedup of at most 2"),
        ({"use": "calm", "first": 4}, "no exit after layer 4 of 4"),
    ],
)
def test_what_a_model_has_no_layers_for_is_refused(options, words, deep):
    module, _ = deep("llama")
    with pytest.raises(PassError, match=words):
        accel.optimize(module, {"depth": options}, target="eager", max_context=64, verify=False)


def test_a_session_takes_over_only_tokens_that_every_layer_ran(deep):
    _, compiled = deep("llama", use="by-call")
    few = plan(0, 1)
    with compiled.session() as source, compiled.session() as other, compiled.session() as back:
        source.prompt(TOKENS[:1, :6])
        source.run(TOKENS[:1, 6:7], run_layers=few)
        assert not other.take(source, np.array([7])) and not other.length
        assert other.take(source, np.array([6])), "the prompt ran all layers"
        back.prompt(TOKENS[:1, :6])
        assert far(other.run(TOKENS[:1, 6:7]), back.run(TOKENS[:1, 6:7])) < 1e-6


def test_batch_invariant_rows_and_fewer_layers_for_single_tokens_exclude_each_other(deep):
    module, _ = deep("llama")
    with pytest.raises(RecipeError, match="leave one of the two out"):
        accel.optimize(
            module,
            ["batch-invariant", "unified-skip"],
            target="eager",
            max_context=64,
            verify=False,
        )


def test_a_recurrent_state_is_refused():
    from accel.compiler.smoke.tiny_models import small_model

    with pytest.raises(PassError, match="recurrent state"):
        accel.optimize(
            small_model("mamba"),
            {"depth": {"use": "unified-skip", "speedup": 1.0}},
            target="eager",
            max_context=64,
        )


# calm


def test_the_first_exit_that_is_sure_enough_is_taken(deep):
    module, compiled = deep("llama", use="calm", first=1, every=1, threshold=NEVER)
    depths = {n: oracle(module, TOKENS[:1, :10], _ran(n))[:, -1:] for n in range(1, LAYERS + 1)}
    gaps = [_gap(depths[n]) for n in range(1, LAYERS)]
    found = []
    with compiled.session() as session:
        session.run(TOKENS[:1, :9])
        for limit in (0.0, *(gap * by for gap in sorted(gaps) for by in (0.99, 1.01)), NEVER):
            session.rewind(9)
            found.append(next((n for n, gap in enumerate(gaps, 1) if gap >= limit), LAYERS))
            assert far(session.run(TOKENS[:1, 9:10], threshold=limit), depths[found[-1]]) < 1e-4
    assert found == sorted(found) and len(set(found)) > 1
    assert far(depths[1], depths[LAYERS]) > 1e-2


def _ran(depth):
    """Nine tokens through all layers, a tenth through the first `depth`."""
    ran = np.ones((LAYERS, 10), bool)
    ran[depth:, 9] = False
    return ran


def test_the_first_sure_exit_is_taken_by_all_rows_or_by_none(deep):
    _, compiled = deep("llama", use="calm", first=1, every=1, threshold=NEVER)
    with compiled.session(2) as both:
        both.run(TOKENS[:, :9])
        got = both.run(TOKENS[:, 9:10], threshold=0.1)
    with compiled.session(2) as session:
        session.run(TOKENS[:, :9])
        for depth in range(1, LAYERS):
            session.rewind(9)
            out = session.run(
                TOKENS[:, 9:10], run_layers=np.arange(LAYERS) < depth, threshold=NEVER
            )
            if _gap(out) >= 0.1:
                assert far(got, out) < 1e-4
                return
    assert far(got, compiled.logits(TOKENS[:, :10])[:, -1:]) < 1e-4


def _gap(logits):
    """How far apart the two likeliest tokens are, in the row where that is least."""
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    best = np.sort(shares / shares.sum(-1, keepdims=True), -1)
    return float((best[..., -1] - best[..., -2]).min())


@pytest.mark.parametrize("name", ["calm", "unified-skip"])
def test_a_later_prompt_of_one_token_runs_all_layers(deep, name):
    options = {
        "calm": {"first": 1, "every": 1, "threshold": 0.01},
        "unified-skip": {"speedup": 2.0},
    }
    _, compiled = deep("llama", "eager", use=name, **options[name])
    with compiled.session() as session:
        session.prompt(TOKENS[:1, :9])
        got = session.prompt(TOKENS[:1, 9:10])
    assert far(got, compiled.logits(TOKENS[:1, :10])[:, -1:]) < 1e-4


# shortgpt


def test_a_layer_that_does_nothing_goes_first_and_nothing_changes(deep):
    module = copy.deepcopy(deep("llama")[0])
    with torch.no_grad():
        module.model.layers[2].self_attn.o_proj.weight.zero_()
        module.model.layers[2].mlp.down_proj.weight.zero_()
    whole = np.ones((LAYERS, TOKENS.shape[1]), bool)
    with accel.optimize(module, "shortgpt", max_context=64, max_batch=2) as compiled:
        assert "deleted layers 2 (0.000) of 4" in compiled.report["notes"][-1]
        assert far(compiled.logits(TOKENS), oracle(module, TOKENS, whole)) < 1e-4
        names = [s.name for s in compiled.program.state]
        assert names == ["kv.pos", *(f"kv.{i}.{part}" for i in range(LAYERS - 1) for part in "kv")]
        assert compiled.facts.num_layers == len(compiled.facts.layers) == LAYERS - 1
        assert compiled.facts.parameters < sum(p.numel() for p in module.parameters())
        assert not any("layers.2." in name for name in compiled.program.params)


@pytest.mark.long
def test_a_path_is_kept_in_the_layers_that_are_left(deep):
    """What keeps a path of a tree moves the state that the step wrote, which counts from 0 again."""
    module, prompt = deep("llama")[0], TOKENS[:1, :9]
    plain = {"depth": {"use": "shortgpt"}}
    with (
        accel.optimize(module, plain, max_context=64) as one,
        accel.optimize(module, {**plain, "loop": {"use": "lookahead"}}, max_context=64) as other,
    ):
        assert one.generate(prompt, 20, eos=[]).tokens == other.generate(prompt, 20, eos=[]).tokens


@pytest.mark.long
def test_a_method_that_picks_a_layer_finds_it_by_its_new_number(deep):
    module = copy.deepcopy(deep("llama")[0])
    recipe = {
        "depth": {"use": "shortgpt"},
        "prefill.prune": {"use": "gemfilter", "tokens": 5, "layer": 1},
    }
    with torch.no_grad():  # so that layer 1 goes
        module.model.layers[1].self_attn.o_proj.weight.zero_()
        module.model.layers[1].mlp.down_proj.weight.zero_()
    with (
        accel.optimize(module, recipe, max_context=64, verify=False) as compiled,
        accel.optimize(module, recipe, target="eager", max_context=64, verify=False) as eager,
    ):
        assert (
            compiled.generate(TOKENS[:1], 8, eos=[]).tokens
            == eager.generate(TOKENS[:1], 8, eos=[]).tokens
        )


def test_all_but_the_first_and_the_last_layer_may_go(deep):
    module, _ = deep("llama")
    options = {"use": "shortgpt", "share": 0.5}
    with accel.optimize(
        module, {"depth": options}, target="eager", max_context=64, verify=False
    ) as made:
        note = made.report["notes"][-1]
        assert re.search(r"deleted layers 1 \(.*\), 2 \(.*\) of 4", note), note


def test_influence_is_one_less_the_mean_cosine(deep, monkeypatch):
    """Of a row's tokens behind its first, by transformers' hidden states. The control: with the first."""
    module, _ = deep("llama")
    influence, seen = shortgpt.influence, []

    def watched(program, calls, text):
        found = influence(program, calls, text)
        seen.append((text, found.mean(0)))
        return found

    monkeypatch.setattr(shortgpt, "influence", watched)
    recipe = {"depth": {"use": "shortgpt"}}
    accel.optimize(module, recipe, target="eager", max_context=64, verify=False).close()
    ((text, found),) = seen
    with torch.no_grad():
        states = module(text, output_hidden_states=True).hidden_states[
            :LAYERS
        ]  # the last is normed
    near = [torch.cosine_similarity(a, b, dim=-1) for a, b in pairwise(states)]
    want, other = ([1 - float(x[:, n:].mean()) for x in near] for n in (1, 0))
    np.testing.assert_allclose(found[: LAYERS - 1], want, atol=1e-5)
    assert np.abs(np.subtract(want, other)).max() > 1e-4


@pytest.mark.long
def test_no_share_deletes_nothing(deep):
    module, base = deep("llama")
    with accel.optimize(
        module, {"depth": {"use": "shortgpt", "share": 0.1}}, max_context=64
    ) as compiled:
        assert np.array_equal(compiled.logits(TOKENS[:1]), base.logits(TOKENS[:1]))


# lowering


@pytest.mark.long
def test_weights_of_few_bits_and_fused_operators_stay_so_within_the_branches(deep):
    module, _ = deep("llama")
    recipe = {
        "weights": {"use": "int4", "smallest": 256, "eight": 0.0},  # or q, k and v are divided
        "depth": {"use": "unified-skip", "cache": "propagate"},
    }
    with (
        accel.optimize(module, recipe, max_context=64) as compiled,
        accel.optimize(module, recipe, target="eager", max_context=64, verify=False) as eager,
    ):
        found = []
        for model in (compiled, eager):
            with model.session() as session:
                first = session.run(TOKENS[:1, :9], run_layers=plan(0, 2))
                found.append(
                    np.concatenate([first, session.run(TOKENS[:1, 9:12], run_layers=plan(1, 3))], 1)
                )
        assert far(*found) < 0.1
        files = compiled.artifact.entries["step"].graphs
        if "native" not in files:
            pytest.skip("no compiler here")
        graph = onnx.load(compiled.artifact.path / files["native"], load_external_data=False).graph
    branches = [n for n in graph.node if n.op_type == "If"]
    assert len(branches) == LAYERS
    for node in branches:
        ops = {a.name: [n.op_type for n in a.g.node] for a in node.attribute}
        assert ops["then_branch"] == [
            "Linear",
            "PlaceFloat16",
            "AttentionFloat16",
            "Linear",
            "Linear",
            "Linear",
        ]
        assert ops["else_branch"].count("Linear") == 1 and "Attention" not in ops["else_branch"]


def test_a_wrong_branch_for_what_is_left_out_is_caught(deep, monkeypatch):
    def either(b, condition, then, otherwise, values):
        return branch.either(b, condition, then, then, values)

    monkeypatch.setattr(export, "either", either)
    module, _ = deep("llama")
    with pytest.raises(Miscompiled, match="step.onnx, run by onnxruntime"):
        accel.optimize(module, "unified-skip", max_context=64)


@pytest.mark.long
def test_masks_are_computed_once_not_once_per_layer(deep):
    _, compiled = deep("llama", use="unified-skip", cache="nested")
    graph = onnx.load(compiled.artifact.path / "step.onnx", load_external_data=False).graph
    inside = [n for b in graph.node if b.op_type == "If" for a in b.attribute for n in a.g.node]
    assert [n.op_type for n in graph.node].count("LessOrEqual") == 1
    assert not any(n.op_type in ("LessOrEqual", "Where") for n in inside)
