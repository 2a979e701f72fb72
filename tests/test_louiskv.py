"""LouisKV: its boundaries and worth by number, the lists of clusterkv, builds against the oracle, bad input."""

import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Mask
from accel.passes.kv.select.louiskv import Louiskv

from .select_case import built, law_every_target, llama

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
        *(m.choose(x, Mask("causal"), {}, none)[0].sort(3).values for m in (mine, theirs))
    )


def law_worth(method):
    """The units of a list are in the order of the mean share over a group's heads."""
    for seed in range(4):
        x = inputs(H, seed=seed)
        listed = method.choose(x, Mask("causal"), {}, x["slots"] < 0)[0]
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
    listed = built("louiskv", boundary=2.0).choose(x, Mask("causal"), {}, x["slots"] < 0)[0]
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
    found, memory = method.choose(x, Mask("causal"), before, known)
    which = method.searched(x["queries"], last, known)
    both = torch.cat((last[:, None], x["queries"]), dim=1)
    for row, i in np.ndindex(B, T):
        query = both[row, which[row, i]]
        assert torch.equal(memory["query"][row, i], query)
        one = {**x, "queries": query[None, None].expand(B, 1, -1, -1), "slots": x["slots"] + i}
        one["positions"] = one["slots"][:, None]
        alone = every.choose(one, Mask("causal"), {}, known)[0]
        assert torch.equal(found[row, :, i, -8:], alone[row, :, 0, -8:])
    assert torch.equal(memory["last"], x["queries"])


def test_generated_tokens_are_in_runs():
    keys = torch.randn(2, G, 8, D, generator=torch.Generator().manual_seed(0))
    real, units = torch.ones(2, 8, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)
    generated = torch.tensor([[True], [False]])
    labels, parts = built("louiskv").group(keys, real, units, generated)
    assert labels[0].tolist() == [[0] * 4 + [1] * 4] * G != labels[1].tolist()
    torch.testing.assert_close(parts["mean"][0], keys[0].view(G, 2, 4, D).mean(2))


@pytest.mark.long
def test_every_target_is_that_of_the_oracle():
    model = llama(1)
    recipe = {"kv": {"select": {"use": "louiskv", **Louiskv.small, "boundary": 0.3}}}
    with accel.optimize(model, recipe, max_context=64, max_batch=2) as made:
        law_every_target(made)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"boundary": 3.0}, "boundary = 3.0; give a cosine"),
        ({"boundary": float("nan")}, "boundary = nan"),
        ({"rounds": -1}, "rounds = -1"),
        ({"rounds": 1000}, "rounds = 1000"),
        ({"every": 24}, "every = 24; give a multiple of size = 16"),
        ({"sinks": 1024}, "sinks = 1024"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    with pytest.raises(RecipeError, match=why):
        built("louiskv", **{"size": 16, "every": 64, "tokens_read": 1024, **options})
