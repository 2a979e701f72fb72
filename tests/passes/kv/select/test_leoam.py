"""LeoAM: bounds of chunks and pages, its choice beside quest's, what it keeps, builds against the oracle, bad input."""

import models
import pytest
import torch

import accel
from accel.ir.ops.attention import Form
from accel.ir.state import Home
from accel.passes.kv.select._pages import Where

from ....refused import refuses
from ....select_case import built
from ....session_ways import law_every_target

B, G, R, T, C, D = 2, 2, 3, 4, 96, 8
SLOTS = torch.tensor([90, 53])


def case(method, seed=0, scale=None):
    """What the tokens of a call choose by, the method's own parts of random keys, where they lie."""
    r = torch.Generator().manual_seed(seed)
    keys = torch.randn(B, G, C, D, generator=r)
    if scale is not None:
        keys *= scale
    queries = torch.randn(B, G, R * T, D, generator=r)
    parts = {}
    for slots, suffix in ((method.chunk, f".{method.chunk}"), (method.page, "")):
        found = method.summary(keys.unflatten(2, (-1, slots)))
        parts |= {f"{n}{suffix}": x for n, x in found.items()}
    q_pos = SLOTS[:, None] + torch.arange(T)
    held = torch.arange(C).expand(B, -1)
    k_pos = torch.where(held < SLOTS[:, None] + T, held, -1)
    return {"queries": queries, "parts": parts}, Where(q_pos, k_pos, SLOTS, Form("causal")), keys


def as_sets(lists):
    return [{n for n in row if n >= 0} for row in lists.flatten(0, 2).tolist()]


def law_bounds(method, seed):
    """A chunk's bound is above that of its pages, and that above the products with their keys."""
    x, _, keys = case(method, seed)
    each = method.chunk // method.page
    names = {n: f"{n}.{method.chunk}" for n in ("high", "low")}
    fine = method.score(x["queries"], x["parts"])
    coarse = method.score(x["queries"], {n: x["parts"][name] for n, name in names.items()})
    products = (x["queries"] @ keys.mT).unflatten(3, (-1, method.page)).amax(4)
    assert (fine >= products - 1e-5).all()
    assert (coarse >= fine.unflatten(3, (-1, each)).amax(4) - 1e-5).all()


def test_bounds_are_above_every_member():
    for seed in range(3):
        law_bounds(built("leoam"), seed)

    class Broken(type(built("leoam"))):
        def summary(self, keys):
            return {"high": keys.mean(3), "low": keys.mean(3)}

    with pytest.raises(AssertionError):
        law_bounds(Broken(**vars(built("leoam"))), 0)


def law_one_level(**options):
    """It chooses what quest does."""
    for seed in range(3):
        method, quest = built("leoam", **options), built("quest", page=built("leoam").page)
        x, where, _ = case(method, seed)
        assert as_sets(method.choice(x, where, R)) == as_sets(quest.choice(x, where, R))


@pytest.mark.parametrize("options", [{"chunk": 4}, {"spread": 8}], ids=str)
def test_with_one_level_or_all_chunks_it_is_quest(options):
    law_one_level(**options)


def test_with_few_chunks_it_is_not():
    with pytest.raises(AssertionError):
        law_one_level(chunk=32, spread=1, tokens_read=16)


def test_pages_are_the_best_of_the_best_chunks():
    """By hand, one token and head at a time."""
    method = built("leoam", tokens_read=16, spread=1, chunk=16)
    x, where, keys = case(method, 5, torch.rand(B, G, C, 1, generator=torch.Generator()) * 3)
    found = method.choice(x, where, R)
    queries = x["queries"].unflatten(2, (R, T))
    for row in range(B):
        for head in range(G):
            for token in range(T):
                q, k, own = queries[row, head, :, token], keys[row, head], int(SLOTS[row]) + token

                def bounds(size, q=q, k=k):
                    high, low = (
                        getattr(k.unflatten(0, (-1, size)), n)(1) for n in ("amax", "amin")
                    )
                    return torch.maximum(q[:, None] * high, q[:, None] * low).sum(-1).amax(0)

                chunks = bounds(16)[: own // 16].topk(min(method.taken - 1, own // 16)).indices
                pages = {4 * c + i for c in [*chunks.tolist(), own // 16] for i in range(4)}
                pages = [p for p in pages if p < own // 4]
                best = sorted(pages, key=lambda p: -bounds(4)[p])[: method.count - 1]
                listed = found[row, head, token].tolist()
                assert listed[0] == own // 4
                assert {p for p in listed[1:] if p >= 0} == set(best)


@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle():
    small = {
        "use": "leoam",
        "tokens_read": 12,
        "page": 4,
        "chunk": 16,
        "dense_layers": 1,
        "spread": 1,
    }
    with accel.optimize(
        models.make("llama", 2), {"kv": {"select": small}}, max_context=128, max_batch=2
    ) as made:
        law_every_target(made)
        homes = {s.name for s in made.artifact.state if s.home is Home.MAPPED}
        assert homes == {"kv.1.k", "kv.1.v"}  # layer 0 reads everything
        per_token = 8 + 2 * 2 * 10 * 4 * (2 + 2 / 2 / 4 + 2 / 2 / 16)
        assert made.report["kv_bytes_per_token"] == per_token
        assert made.report["kv_mapped_per_token"] == 2 * 2 * 10 * 4


test_options_that_make_no_sense = refuses(
    "kv.select.leoam",
    ({"chunk": 24}, "kv.select.leoam: chunk is 24; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"chunk": 8}, "kv.select.leoam: chunk is 8; give a multiple of page = 16$"),
    ({"chunk": 0}, "kv.select.leoam: chunk is 0; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"chunk": 256}, "kv.select.leoam: chunk is 256; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"spread": 0}, "kv.select.leoam: spread is 0; give 1 to 1024"),
    ({"spread": 5000}, "kv.select.leoam: spread is 5000; give 1 to 1024"),
    ({"page": 24}, "kv.select.leoam: page is 24; give 1, 2, 4, 8, 16, 32, 64 or 128"),
    ({"tokens_read": 0}, "kv.select.leoam: tokens_read is 0; give at least 1"),
    ({"chunks": 3}, "did you mean 'chunk'"),
)
