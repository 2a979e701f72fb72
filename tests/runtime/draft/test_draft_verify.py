"""draft = draft-verify: what drafts run, the plan's file, and the search that makes it, against plain sums and brute
force.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import draft_verify as runs
from accel.compiler.train.source import Source
from accel.ir.capture.capture import capture
from accel.ir.depth import RUN_ATTN, RUN_MLP
from accel.ir.errors import InputError
from accel.passes.depth.sublayer_skip import ATTENTION, MLP, influence
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.draft_verify import DraftVerify
from accel.runtime.length.fixed import Fixed

from ...depth_case import LAYERS, branch_oracle, module_of, program_of
from ...draft_case import plain, rows_of, speculated
from ...part_case import written
from ...prefill_case import TOKENS, built

TABLES = {"draft": {"use": "draft-verify"}, "depth": {"use": "by-branch"}}
PROMPTS = TOKENS[:2, :9]
TEXT = torch.from_numpy(np.random.default_rng(3).integers(0, 90, (3, 16)))
EVERY = [(kind, i) for kind in (RUN_ATTN, RUN_MLP) for i in range(LAYERS)]


@pytest.fixture(scope="module")
def model():
    return built("llama:4", tables=TABLES)


def part_of(model, attn, mlp, file, cost=0.5):
    tensors = {"attn": attn, "mlp": mlp, "cost": [cost]}
    return DraftVerify(written(model, "draft-verify", tensors, file))


def generated(model, method, sampled=False, **options):
    rows = rows_of(PROMPTS, **options)
    for i, row in enumerate(rows):
        if sampled:
            row.sampler = row.sampler.__class__(temperature=0.9)
            row.rng = np.random.default_rng(i)
    if method is None:
        return plain(model.session(2), rows), rows
    with model.session(2) as session:
        list(speculated(session, rows, method, "sample-match", length=Fixed(5), model=model))
    return [row.tokens for row in rows], rows


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.few(1)
def test_tokens_are_those_of_plain_decoding(model, sampled):
    want, _ = generated(model, None, sampled)
    got, rows = generated(model, DraftVerify(), sampled)
    assert got == want
    assert sum(row.drafting["drafted"] for row in rows) > 0


def test_what_leaves_out_nothing_is_always_right_and_what_leaves_out_most_hardly(model, tmp_path):
    """The control: the same loop with all branches of the middle layers off."""
    stood = []
    for n, off in enumerate(((), (1, 2))):
        flags = [float(i not in off) for i in range(LAYERS)]
        _, rows = generated(model, part_of(model, flags, flags, tmp_path / str(n)))
        counts = sum((row.drafting for row in rows), start=type(rows[0].drafting)())
        stood.append(counts["accepted"] / counts["drafted"])
    assert stood[0] == 1 > stood[1] + 0.1


def test_without_a_part_every_second_layer_is_left_out(model):
    plan, cost = DraftVerify().plan(DecodeContext(model=model))
    assert plan.attn.tolist() == plan.mlp.tolist() == [True, False, True, True]
    assert 0.75 < cost < 1, "the layers that run, and the head"


def test_the_plan_is_the_parts(model, tmp_path):
    attn, mlp = [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    method = part_of(model, attn, mlp, tmp_path / "a", 0.25)
    plan, cost = method.plan(DecodeContext(model=model))
    assert (plan.attn.tolist(), plan.mlp.tolist(), cost) == ([1, 0, 1, 0], [1, 1, 0, 1], 0.25)
    asked = []
    with model.session(2) as session:
        session.prompt(PROMPTS)
        run, rows = session.run, rows_of(PROMPTS)
        session.run = lambda *a, **controls: asked.append(controls) or run(*a, **controls)
        for row in rows:
            row.accept(5, None)
        drafters = method.open(session, rows, context_of(model))
        drafters.draft({0: 2}, Fixed(5).open(rows, lambda n: 1.0))
    assert [{n: c.tolist() for n, c in one.items()} for one in asked] == [
        {"run_attn": attn, "run_mlp": mlp}
    ] * 2


def context_of(model):
    return DecodeContext(model._methods, None, model)


def test_what_does_not_fit_is_refused(model, tmp_path):
    other = built("llama", tables=TABLES)
    method = part_of(model, [1.0] * 4, [1.0] * 4, tmp_path / "a")
    with pytest.raises(
        InputError, match="trained for another model; train it: accel-compile train draft-verify"
    ):
        generated_with(other, method)
    short = part_of(model, [1.0] * 3, [1.0] * 3, tmp_path / "b")
    with pytest.raises(InputError, match="a plan of 3 layers, but the model has 4"):
        generated_with(model, short)
    with pytest.raises(
        InputError, match="draft-verify needs a model .* build with depth = by-branch"
    ):
        generated_with(built("llama", tables={"depth": {"use": "by-call"}}), DraftVerify())


def generated_with(model, method):
    with model.session(2) as session:
        list(speculated(session, rows_of(PROMPTS), method, "sample-match", model=model))


# The search


@pytest.fixture(scope="module")
def search():
    with torch.no_grad():
        return runs.Search(program_of(LAYERS, TEXT), TEXT)


def oracle(left_out):
    """The share of tokens for which a module with branches off says what it says whole."""
    plans = [
        [[(kind, i) not in left_out] * TEXT.shape[1] for i in range(LAYERS)]
        for kind in (RUN_ATTN, RUN_MLP)
    ]
    whole = np.ones_like(plans, bool)
    got, want = (
        branch_oracle("llama", module_of(LAYERS), TEXT.numpy(), *p).argmax(-1)
        for p in (plans, whole)
    )
    return float((got == want).mean())


@pytest.mark.parametrize("left_out", [(), EVERY[1:2], EVERY[6:7], (EVERY[1], EVERY[5], EVERY[6])])
def test_a_plan_is_worth_what_it_has_right(search, left_out):
    with torch.no_grad():
        found = search.tried(frozenset(left_out))
    assert found.share == pytest.approx(oracle(left_out))
    assert (found.share == 1) == (not left_out)


def test_costs_are_the_weights_that_are_read(search):
    module = module_of(LAYERS)
    layer = module.model.layers[2]

    def size(*parts):
        return sum(p.numel() for part in parts for p in part.parameters())

    attention = size(layer.self_attn, layer.input_layernorm)
    mlp = size(layer.mlp)  # its norm is one step with the sum before it, which stays
    head = module.lm_head.weight.numel() + size(module.model.norm)
    whole = LAYERS * (attention + mlp) + head
    with torch.no_grad():
        for left_out, gone in (({(RUN_ATTN, 2)}, attention), ({(RUN_MLP, 2)}, mlp)):
            assert search.tried(frozenset(left_out)).cost == pytest.approx(1 - gone / whole)


def test_the_expected_speed_is_that_of_many_rounds():
    rng, share, cost, length = np.random.default_rng(0), 0.7, 0.3, 4
    fell = rng.random((20000, length)) > share
    stood = np.where(fell.any(1), fell.argmax(1), length)
    simulated = (stood + 1).mean() / (length * cost + 1)
    assert runs.expected(share, cost, length) == pytest.approx(simulated, rel=0.02)
    one = runs.Tried(frozenset(), share, cost)
    assert one.speed == max(runs.expected(share, cost, n) for n in range(1, 13))


def test_branches_are_left_out_one_by_one_and_the_best_plan_stays(search, monkeypatch):
    """Each step is the best of the next few, and no plan that was seen is better than what is found."""
    seen, tried = [], search.tried
    monkeypatch.setattr(search, "tried", lambda out: seen.append(tried(out)) or seen[-1])
    monkeypatch.setattr(runs, "TRIED", 3)
    monkeypatch.setattr(runs, "USELESS", 0.0)
    told = []
    with torch.no_grad():
        proposals = search.proposals
        best = search.run(proposals, lambda what, share: told.append(share), lambda line: None)
        search._set_out(frozenset())
    assert best.speed == max(one.speed for one in seen)
    sizes = [len(one.left_out) for one in seen]
    assert sizes == sorted(sizes) and set(sizes) == set(range(1, len(proposals) + 1))
    steps = [[one for one in seen if len(one.left_out) == n] for n in sorted(set(sizes))]
    for before, after in pairwise(steps):
        stays = max(before, key=lambda one: one.speed).left_out
        assert all(one.left_out > stays for one in after) and len(after) <= 3
    assert told == sorted(told) and 0 <= told[0] and told[-1] < 1
    assert all(i for _, i in best.left_out), "those of the first layer stay"


def test_what_changes_the_stream_least_is_tried_first(search):
    found = influence(search.program, search.calls, search.layered, TEXT[:1])
    kinds = {RUN_ATTN: ATTENTION, RUN_MLP: MLP}
    order = [found[kinds[kind], i] for kind, i in search.proposals]
    assert order == sorted(order) and len(order) == 2 * (LAYERS - 1)


@pytest.mark.long
def test_a_part_is_searched_written_and_read(tmp_path):
    """Of the module of the tests: the file holds the plan of the search, and is for that model."""

    class Loaded(Source):
        program = over_state(capture(module_of(LAYERS), max_context=64))

    rows = iter([(torch.cat([TEXT, TEXT[:, :1]], 1), torch.ones_like(TEXT))] * 9)
    source = Loaded(Path("x"), None, None, lambda *_: None, lambda _: None, lambda *_: rows)
    options = TrainOptions(out=tmp_path / "plan.safetensors", samples=3, length=16)
    made = runs.Searched.make(DraftVerify(), source, options)
    model = built("llama:4", tables=TABLES)
    method = DraftVerify(str(made.file))
    method.fit(model)
    plan, cost = method.plan(DecodeContext(model=model))
    assert plan.share < 1 and 0 < cost < 1 and plan.attn[0] and plan.mlp[0]
    assert "speed" in made.message and "held" in made.message
