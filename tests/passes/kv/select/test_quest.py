"""Quest: its bound and choice by number, builds of several models against the oracle, bad input, what is refused."""

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import PassError, RecipeError
from accel.ir.ops.attention import Form, attention
from accel.ir.ops.choice import page_bounds
from accel.ir.recipe import Recipe
from accel.passes.kv.select import Select
from accel.passes.kv.select._pages import chosen
from accel.passes.kv.select.quest import Quest

from ....once import made_once
from ....refused import refuses
from ....select_case import built
from ....session_ways import law_every_target

numbers = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    q=st.lists(numbers, min_size=5, max_size=5),
    keys=st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=8),
)
def test_no_key_of_a_page_gives_more_than_its_bound(q, keys):
    query, page = torch.tensor(q)[None, None, None], torch.tensor(keys)[None, None, None]
    parts = Quest().summary(page)
    bound = float(Quest().score(query, parts))
    most = float((page[0, 0, 0].double() @ query[0, 0, 0].double()).max())
    assert bound >= most - 1e-6 * max(1.0, float((page.abs().amax(3) * query.abs()).sum()))
    by_channel = torch.maximum(query * parts["high"], query * parts["low"]).sum(-1)
    torch.testing.assert_close(by_channel.flatten(), torch.tensor([bound]), rtol=1e-5, atol=1e-2)


def test_pages_of_one_slot_are_exact_top_k():
    """Of the group's best logits, the token's own aside."""
    quest = built("quest", page=1, tokens_read=7)
    x = torch.randn(1, 2, 30, 10, generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, 2, 1, 3, 10, generator=torch.Generator().manual_seed(1))
    positions, slots, held = torch.tensor([[29]]), torch.tensor([29]), torch.arange(30)[None]
    parts = quest.summary(x[:, :, :, None])
    queries = q.transpose(1, 2).reshape(1, 1, 6, 10)
    asked = {"queries": queries, "positions": positions, "k_pos": held, "slots": slots}
    found = chosen(quest, Form("causal"), 2, list(parts), asked | parts)
    logits = (q[:, :, 0] @ x.transpose(-1, -2)).amax(2)[..., :29]
    want = logits.topk(6, dim=2).indices
    assert found[0, :, 0, 0].tolist() == [29, 29]
    assert torch.equal(found[0, :, 0, 1:].sort().values, want[0].sort().values)


def test_attention_over_pages_is_attention_over_their_slots():
    r = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, n, s, 6, generator=r) for n, s in ((4, 1), (2, 32), (2, 32)))
    pages = torch.tensor([[[[5, 0, -1]], [[5, 3, 1]]]])
    where = torch.arange(32)[None]
    form = (None, 0.4, 0.0, "causal", 0)
    got = attention(q, k, v, torch.tensor([[22]]), where, *form, pages=pages, page=4)
    for group, listed in enumerate(([5, 0], [5, 3, 1])):
        slots = torch.tensor([4 * p + i for p in listed for i in range(4) if 4 * p + i <= 22])
        part = [x[:, [group]][:, :, slots] for x in (k, v)]
        heads = slice(2 * group, 2 * group + 2)
        want = attention(q[:, heads], *part, torch.tensor([[22]]), slots[None], *form)
        torch.testing.assert_close(got[:, heads], want)
    whole = attention(q, k, v, torch.tensor([[22]]), where, *form)
    none = attention(q, k, v, torch.tensor([[22]]), where, *form, pages=pages[:, :, :0], page=4)
    assert torch.equal(whole, none) and not torch.equal(whole, got)


def test_what_is_no_number_is_read():
    """As attention over everything would read it."""
    keys = torch.randn(1, 1, 9, 4, 3)
    keys[0, 0, 2, 1, 0] = float("nan")
    score = Quest(page=4).score(torch.ones(1, 1, 1, 3), Quest(page=4).summary(keys))
    assert score.isnan().flatten().tolist() == [i == 2 for i in range(9)]
    large = torch.full((1, 1, 2, 3), 3e38)
    assert page_bounds(torch.zeros(1, 1, 1, 3), large, -large).abs().max() == 0


# Builds

WIDE = {"page": 16, "tokens_read": 1, "dense_layers": 0}


@pytest.fixture(scope="module")
def made():
    """made(architecture, *recipes, **options) -> its artifact, two layers, built once."""

    def get(name, *recipes, **options):
        model = models.make(name, 2)
        quest = {"use": "quest", "tokens_read": 12, "page": 4, "dense_layers": 1, **options}
        recipe = [{"kv": {"select": quest}}, *recipes]
        verify = options == {}
        return accel.optimize(model, recipe, max_context=128, max_batch=2, verify=verify)

    with made_once(get) as found:
        yield found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "recipes", "options"),
    [("llama", (), {}), ("llama", (), WIDE), ("mistral", ("kv-int8",), {})],
    ids=str,
)
def test_every_way_through_a_session_is_that_of_the_oracle(made, name, recipes, options):
    compiled = made(name, *recipes, **options)
    law_every_target(compiled, np.median if recipes == ("kv-int8",) else np.max)


def test_what_it_keeps_is_its_formula(made):
    compiled = made("llama", **WIDE)
    width, groups, layers = 10, 2, 2
    per_token = 8 + layers * groups * width * 4 * (2 + 2 / 16)
    assert compiled.report["kv_bytes_per_token"] == per_token
    with compiled.session(batch=2) as session:
        session.run(np.full((2, 20), 5))
        assert session.stats["kv_bytes"] == 2 * 256 * per_token
    state = {s.name: (s.dtype, s.shape) for s in compiled.artifact.state}
    assert state["pages.1.low"] == ("float32", ("B", groups, "C/16", width))
    assert compiled.report["grade"] == "approximate"
    assert "genai" not in compiled.artifact.entries


# Bad input, and what is refused


test_options_that_make_no_sense = refuses(
    "kv.select.quest",
    ({"page": 0}, "kv.select.quest: page is 0; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"page": -16}, "kv.select.quest: page is -16; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"page": 24}, "kv.select.quest: page is 24; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"page": 256}, "kv.select.quest: page is 256; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"tokens_read": 0}, "kv.select.quest: tokens_read is 0; give at least 1"),
    ({"tokens_read": -5}, "kv.select.quest: tokens_read is -5; give at least 1"),
    ({"dense_layers": -1}, "kv.select.quest: dense_layers is -1; give at least 0"),
    ({"page": 16.0}, "not int"),
    ({"pages": 3}, "page"),
)


def test_who_counts_attention_is_refused():
    with pytest.raises(
        RecipeError,
        match="h2o cannot be combined with kv.select = quest: .*every query attends to every key",
    ):
        assemble(Recipe(tables={"kv.score": {"use": "h2o"}, "kv.select": {"use": "quest"}}))


def test_equal_bits_are_refused():
    with pytest.raises(
        RecipeError,
        match="batch-invariant cannot be combined with kv.select = quest: .*the same bits",
    ):
        assemble(
            Recipe(tables={"kv.select": {"use": "quest"}, "numerics": {"use": "batch-invariant"}})
        )


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("bloom", {}, "does not include a position bias"),
        ("llama", {"dense_layers": 9}, "dense_layers is 9"),
    ],
)
def test_layers_that_stay_dense_are_named(stateful, name, options, why):
    report = Select(built("quest", **options)).run(stateful(name))
    assert not report.changed and all(why in line for line in report.refused)


def test_where_no_layer_can_choose_the_build_is_refused():
    with pytest.raises(
        PassError, match="kv.select = 'quest' changed nothing. Nearest miss.*dense_layers is 2"
    ):
        accel.optimize(models.tiny(), "quest", max_context=32)
