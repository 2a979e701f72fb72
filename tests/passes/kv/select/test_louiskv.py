"""LouisKV: its boundaries and worth by number, the lists of clusterkv, builds against the oracle, bad input."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.select._tokens import RING
from accel.passes.kv.select.louiskv import Louiskv

from ....select_case import Selecting, built
from ....session_ways import law_every_target

B, T, H, G, C, D = 2, 12, 4, 2, 64, 6


def walk(seed=0):
    """Queries [B,T,H,D] that change slowly, and that of the token before [B,H,D]."""
    r = torch.Generator().manual_seed(seed)
    found = torch.randn(B, T + 1, H, D, generator=r).cumsum(1)
    return found[:, 1:], found[:, 0]


def by_hand(queries, last, known, boundary):
    """Token after token, in NumPy: r = mean over heads of cos(before, own); a search where r < boundary."""
    found = []
    for row in range(B):
        taken, before = [], last[row].numpy() if known[row] else None
        for i, query in enumerate(queries[row].numpy()):
            new = before is None
            if not new:
                norms = np.linalg.norm(query, axis=1) * np.linalg.norm(before, axis=1)
                new = ((query * before).sum(1) / norms).mean() < boundary
            taken.append(i + 1 if new else (taken[-1] if taken else 0))
            before = query
        found.append(taken)
    return found


def law_boundaries(method):
    for seed in range(3):
        queries, last = walk(seed)
        known = torch.tensor([True, False])
        want = by_hand(queries, last, known, method.boundary)
        assert method.searched(queries, last, known).tolist() == want
        assert len({i for row in want for i in row}) not in (1, T), "or the case would say little"


@pytest.mark.parametrize("boundary", [0.5, 0.8])
def test_searches_are_where_a_query_is_unlike_the_one_before(boundary):
    law_boundaries(built("louiskv", boundary=boundary))


def test_boundaries_of_heads_put_together_are_caught():
    class Broken(Louiskv):
        def searched(self, queries, last, known):
            return super().searched(queries.flatten(2)[:, :, None], last.flatten(1)[:, None], known)

    with pytest.raises(AssertionError):
        law_boundaries(Broken(**Louiskv.small))


def test_a_boundary_below_all_cosines_is_one_search_and_none_is_made_twice():
    queries, last = walk()
    none = torch.tensor([False, False])
    assert (built("louiskv", boundary=-1.5).searched(queries, last, none) == 1).all()
    queries[0, 5] = float("nan")
    found = built("louiskv", boundary=-1.5).searched(queries, last, ~none)
    assert found[0].tolist() == [0] * 5 + [6] + [7] * 6, "what is like nothing is a boundary"
    assert not found[1].any()


def inputs(heads, tokens=1, seed=0):
    r = torch.Generator().manual_seed(seed)
    slots = torch.tensor([C - tokens, 50 - tokens])
    return {
        "queries": 3 * torch.randn(B, tokens, heads, D, generator=r),
        "positions": slots[:, None] + torch.arange(tokens),
        "k_pos": torch.arange(C).expand(B, -1),
        "slots": slots,
        "origin": torch.tensor([20, 14]),
        "label": torch.randint(0, 9, (B, G, C), generator=r),
        "mean": torch.randn(B, G, 9, D, generator=r),
    }


def test_one_head_per_group_reads_what_clusterkv_does():
    x, none = inputs(G), torch.zeros(B, dtype=torch.bool)
    options = {"tokens_read": 10, "size": 4, "every": 8, "sinks": 2}
    mine, theirs = built("louiskv", boundary=2.0, **options), built("clusterkv", **options)
    assert torch.equal(
        *(
            m.choose(x, Form("causal", scale=D**-0.5), {}, none)[0].sort(3).values
            for m in (mine, theirs)
        )
    )


def law_worth(method):
    """The units of a list are in the order of the mean share over a group's heads."""
    for seed in range(4):
        x = inputs(H, seed=seed)
        listed = method.choose(x, Form("causal", scale=D**-0.5), {}, x["slots"] < 0)[0]
        for row, head in np.ndindex(B, G):
            seen = range(method.sinks, int(method.grouped(x["slots"][:, None], x["origin"])[row]))
            label = x["label"][row, head]
            units = sorted({int(label[s]) for s in seen})
            two = x["queries"][row, 0].view(G, H // G, D)[head].double()
            shares = (two @ x["mean"][row, head, units].T.double() / D**0.5).softmax(-1).mean(0)
            order = [units[i] for i in shares.argsort(descending=True).tolist()]
            want = [s for u in order for s in seen if label[s] == u]
            assert listed[row, head, 0, -8:].tolist() == want[:8]


def test_units_are_worth_their_mean_share():
    law_worth(built("louiskv", boundary=2.0))


def test_units_worth_the_mean_product_are_caught():
    class Broken(Louiskv):
        def vote(self, scores, seen):
            return scores.mean(2)

    with pytest.raises(AssertionError):
        law_worth(Broken(**{**Louiskv.small, "boundary": 2.0}))


def test_what_is_no_number_is_read():
    x = inputs(H)
    x["mean"][0, 1, 3] = float("nan")
    listed = built("louiskv", boundary=2.0).choose(
        x, Form("causal", scale=D**-0.5), {}, x["slots"] < 0
    )[0]
    assert x["label"][0, 1][listed[0, 1, 0, -8]] == 3


@pytest.mark.parametrize("boundary", [-1.5, 0.6])
def test_lists_between_boundaries_are_those_of_the_search(boundary):
    """While no segment ends: each token's units are those of the query that it goes on with."""
    method = built("louiskv", boundary=boundary, every=64)
    every = built("louiskv", boundary=2.0, every=64)
    x = inputs(H, T)
    x["queries"], last = walk()
    known = torch.tensor([True, False])
    before = {"last": last, "query": last}
    found, memory = method.choose(x, Form("causal", scale=D**-0.5), before, known)
    which = method.searched(x["queries"], last, known)
    both = torch.cat((last[:, None], x["queries"]), dim=1)
    for row, i in np.ndindex(B, T):
        query = both[row, which[row, i]]
        assert torch.equal(memory["query"][row, i], query)
        one = {**x, "queries": query[None, None].expand(B, 1, -1, -1), "slots": x["slots"] + i}
        one["positions"] = one["slots"][:, None]
        alone = every.choose(one, Form("causal", scale=D**-0.5), {}, known)[0]
        assert torch.equal(found[row, :, i, -8:], alone[row, :, 0, -8:])
    assert torch.equal(memory["last"], x["queries"])


def test_generated_tokens_are_cut_at_boundaries():
    keys = torch.randn(5, G, 8, D, generator=torch.Generator().manual_seed(0))
    real, units = torch.ones(5, 8, dtype=torch.bool), torch.ones(5, 2, dtype=torch.bool)
    generated = torch.tensor([[True]] * 4 + [[False]])
    begins = [
        [1, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [-1] * 8,
        [0, 1, 0, 1, 1, 0, 0, 0],  # four segments, of which two and two lie together
        [0] * 8,
    ]
    found = built("louiskv").group(keys, real, units, generated, torch.tensor(begins).float())
    labels, means = found
    want = [[0] * 6 + [1] * 2, [0] * 8, [0] * 4 + [1] * 4, [0] * 3 + [1] * 5]
    for row, label in enumerate(want):
        assert labels[row].tolist() == [label] * G
        first = torch.tensor(label) == 0
        torch.testing.assert_close(means[row, :, 0], keys[row, :, first].mean(1))
    assert labels[4].tolist() not in [[label] * G for label in want], "a prompt has clusters"
    half = torch.tensor([[1, 0, -1, -1, -1, -1, -1, 0.0]])
    assert built("louiskv").segments(half).tolist() == [[0, 0, 1, 1, 2, 2, 2, 2]]


def law_segments(case):
    """Units of generated text begin where a query is unlike the one before, and nowhere else."""
    boundary, plan = case.method.boundary, case.method.plan
    tokens, most, first, queries = case.tokens(1, 72), plan.every // plan.size, 40, []
    with case.session() as session:
        session.prompt(tokens[:, :first])  # more than choose
        for i in range(first, 72):
            session.run(tokens[:, [i]])
            state = session._core.backend._state
            queries.append(state["choice.1.last"][0, i % RING].clone())
        both = torch.stack(queries)
        like = torch.cosine_similarity(both[1:], both[:-1], dim=2).mean(1)
        own = [True, *(like < boundary).tolist()]
        assert state["pages.1.begins"][0, 0, first:72].tolist() == own
        assert (state["pages.1.begins"][0, 0, :first] == -1).all()
        cuts = 0
        for start in range(first, 72, plan.every):
            begins = own[start - first : start - first + plan.every]
            number = np.cumsum(begins) - int(begins[0])
            if number[-1] >= most:
                number = number * most // (number[-1] + 1)
            for label in state["units.1.label"][0, :, start : start + plan.every].tolist():
                assert [one - label[0] for one in label] == number.tolist()
            cuts += len({*number.tolist()}) - 1
        assert 0 < cuts and not all(own)


@pytest.mark.long
def test_a_session_cuts_generated_text_at_boundaries(stateful):
    law_segments(Selecting(stateful("llama"), built("louiskv", boundary=-0.05, size=2)))


@pytest.mark.long
def test_runs_of_one_length_are_caught(stateful):
    class Broken(Louiskv):
        def group(self, keys, real, units, generated, begins):
            return super().group(keys, real, units, generated, torch.full_like(begins, -1))

    options = {**Louiskv.small, "boundary": -0.05, "size": 2}
    with pytest.raises(AssertionError):
        law_segments(Selecting(stateful("llama"), Broken(**options)))


@pytest.mark.long
def test_every_target_is_that_of_the_oracle():
    model = models.make("llama", 1)
    recipe = {"kv": {"select": {"use": "louiskv", **Louiskv.small, "boundary": 0.3}}}
    with accel.optimize(model, recipe, max_context=128, max_batch=2) as made:
        law_every_target(made)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"boundary": 3.0}, "boundary is 3.0; give -2 to 2"),
        ({"boundary": float("nan")}, "boundary is nan; give -2 to 2"),
        ({"rounds": -1}, "rounds is -1; give 0 to 100"),
        ({"rounds": 1000}, "rounds is 1000; give 0 to 100"),
        ({"every": 24}, "every is 24; give a multiple of size = 16"),
        ({"sinks": 1024}, "sinks is 1024; give fewer than tokens_read = 1024"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    with pytest.raises(RecipeError, match=why):
        built("louiskv", **{"size": 16, "every": 64, "tokens_read": 1024, **options})
