"""Attention and MLP of a layer, each under a condition, against modules whose branches add nothing."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.depth import NESTED, PROPAGATE
from accel.ir.errors import InputError, PassError
from accel.passes import run
from accel.passes.depth._branches import branches
from accel.passes.depth._joint import branch_conditions, layers

from .depth_case import KINDS, LAYERS, TOKENS, WHOLE, far, plan
from .depth_case import branch_oracle as oracle
from .depth_case import oracle as layers_off

NONE = ~WHOLE


def over(count, *stretches):
    """Plans [L,T] of (tokens, plan)."""
    return np.stack([p for n, p in stretches for _ in range(n)], 1)[:, :count]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_branches_that_are_off_add_nothing(name, deep):
    module, compiled = deep(name, use="by-branch")
    count = compiled.facts.num_layers
    attn = over(20, (9, WHOLE), (4, plan(0, 1, 3)), (7, plan(0, 3)))[:count]
    mlp = over(20, (9, WHOLE), (4, plan(1, 2)), (7, plan(0)))[:count]
    with compiled.session(2) as session:
        for start, end in ((0, 9), (9, 10), (10, 13), (13, 20)):
            got = session.run(TOKENS[:, start:end], run_attn=attn[:, start], run_mlp=mlp[:, start])
            want = oracle(name, module, TOKENS[:, :end], attn[:, :end], mlp[:, :end])
            assert far(got, want[:, start:]) < 1e-4
    wrong = oracle(name, module, TOKENS[:, :20], mlp, attn)  # the control
    assert far(wrong[:, 9:], want[:, 9:]) > 1e-2


def test_both_branches_off_is_the_layer_off(deep):
    module, compiled = deep("llama", use="by-branch")
    ran = over(12, (9, WHOLE), (3, plan(0, 2)))
    with compiled.session() as session:
        session.run(TOKENS[:1, :9])
        got = session.run(TOKENS[:1, 9:12], run_layers=plan(0, 2))
    assert far(got, layers_off(module, TOKENS[:1, :12], ran)[:, 9:]) < 1e-4
    with compiled.session() as session:
        session.run(TOKENS[:1, :9])
        assert np.array_equal(
            session.run(TOKENS[:1, 9:12], run_attn=plan(0, 2), run_mlp=plan(0, 2)), got
        )


def test_an_mlp_may_run_again_and_attention_may_not(deep):
    _, compiled = deep("llama", use="by-branch")
    with compiled.session() as session:
        session.run(TOKENS[:1, :9])
        session.run(TOKENS[:1, 9:10], run_attn=WHOLE, run_mlp=NONE)
        session.run(TOKENS[:1, 10:11], run_mlp=WHOLE)
        session.run(TOKENS[:1, 11:12], run_attn=plan(0, 1, 2))
        with pytest.raises(InputError, match="run_attn: layer 3 was skipped for token 11 of row 0"):
            session.run(TOKENS[:1, 12:13], run_attn=WHOLE)
        session.rewind(11)
        session.run(TOKENS[:1, 11:12], run_attn=WHOLE)


@pytest.mark.parametrize("cache", [NESTED, PROPAGATE])
def test_keys_of_attention_that_is_off_are_as_the_cache_says(cache, captured):
    program = captured("llama")
    run(program, pipeline())
    branch_conditions(program, cache)
    inputs = {"tokens": torch.tensor(TOKENS[:1, :5]), "positions": torch.arange(5)[None]}
    inputs |= {"slots": torch.zeros(1, dtype=torch.int64), "rows": torch.arange(5)[None]}
    inputs |= {s.name: s.allocate(B=1, C=5) for s in program.state}
    last = len(program.facts.layers) - 1
    off = torch.arange(last + 1) != last
    want, got = (program.run("step", {**inputs, **more}) for more in ({}, {"run_attn": off}))
    name = f"kv.{last}.k.next"
    assert torch.equal(got[name], want[name]) is (cache == PROPAGATE)
    assert bool(got[name].any()) is (cache == PROPAGATE)
    assert far(got["logits"].numpy(), want["logits"].numpy()) > 1e-2


@pytest.mark.parametrize(
    ("controls", "words"),
    [
        ({"run_attn": [True] * 3}, r"run_attn is bool \[3\]; give 4 bools"),
        ({"run_mlp": "all"}, "run_mlp is"),
        ({"run_attn": NONE, "run_mlp": NONE}, "skips every layer"),
        ({"run_attn": WHOLE, "run_layers": WHOLE}, "give it alone"),
    ],
)
def test_a_bad_plan_is_refused_and_changes_nothing(controls, words, deep):
    _, compiled = deep("llama", use="by-branch")
    with compiled.session() as session:
        session.run(TOKENS[:1, :3])
        with pytest.raises(InputError, match=words):
            session.run(TOKENS[:1, 3:5], **controls)
        assert session.length == 3


def test_whole_layers_have_no_branches_to_choose(deep):
    for built in (deep("llama")[1], deep("llama", use="unified-skip")[1]):
        with built.session() as session, pytest.raises(InputError, match="depth = by-branch"):
            session.run(TOKENS[:1], run_mlp=WHOLE)


def test_a_layer_that_is_no_sum_is_refused_and_left_as_it_is(captured):
    program = captured("llama")
    run(program, pipeline())
    call = layers(program)[0]
    found = branches(program, call)
    total = found.mlp[0].total
    with total.graph.inserting_after(total):
        scaled = total.graph.call_function(torch.ops.aten.mul.Tensor, (total, 2.0))
    scaled.meta = dict(total.meta)
    total.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    before = program.text()
    with pytest.raises(PassError, match="layer.0 is no sum of its input, an attention branch"):
        branch_conditions(program, NESTED)
    assert program.text() == before


def test_a_recipe_of_branches_runs_from_onnx():
    module = models.make("llama", 4)
    with accel.optimize(module, "by-branch", max_context=64, max_batch=2) as compiled:
        assert compiled.facts.depth.inputs == {"run_attn": (LAYERS,), "run_mlp": (LAYERS,)}
        assert compiled.report["grade"] == "lossless"
