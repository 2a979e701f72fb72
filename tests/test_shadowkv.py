"""ShadowKV: its chunks beside the paper's by number, what it keeps and where, builds against the oracle, bad input."""

import models
import pytest
import torch

import accel
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Mask
from accel.ir.state import Home
from accel.passes.kv.select import Where
from accel.passes.kv.select.shadowkv import Shadowkv

from .select_case import built, law_every_target, llama

G, R, C, D = 2, 3, 160, 8
OWN = 150  # the slot of the token, which closes no chunk
OPTIONS = {"page": 4, "tokens_read": 24, "outliers": 5, "local": 2}


def case(seed=0):
    """Keys [G,C,D], some of which lie apart from their neighbours, and the queries [G,R,D] of one token."""
    r = torch.Generator().manual_seed(seed)
    common = torch.randn(G, C // 4, 1, D, generator=r)
    keys = (2 * common + torch.randn(G, C // 4, 4, D, generator=r)).flatten(1, 2)
    return keys, torch.randn(G, R, D, generator=r)


def chosen(method, keys, queries):
    parts = method.summary(keys.unflatten(1, (-1, method.page))[None])
    held = torch.where(torch.arange(C) <= OWN, torch.arange(C), -1)[None]
    where = Where(torch.tensor([[OWN]]), held, torch.tensor([OWN]), Mask("causal"))
    return method.choice({"queries": queries[None], "parts": parts}, where, R)[0, :, 0]


def by_paper(method, keys, queries):
    """For each head: local chunks with the token's own, outliers and selected ones, as the paper's code has them."""
    found, own = [], OWN // method.page
    context = own - method.local
    for head in range(G):
        chunks = keys[head, : context * method.page].unflatten(0, (-1, method.page))
        landmarks = chunks.mean(1)
        like = torch.cosine_similarity(landmarks[:, None], chunks, dim=-1).amin(1)
        outliers = like.topk(method.outliers, largest=False).indices.tolist()
        rest = [n for n in range(context) if n not in outliers]
        shares = (queries[head] @ landmarks[rest].T / D**0.5).softmax(-1).amax(0)
        best = shares.topk(method.tokens_read // method.page).indices.tolist()
        found.append((range(context, own + 1), outliers, [rest[i] for i in best]))
    return found


def law_paper(method, seed):
    keys, queries = case(seed)
    lists = chosen(method, keys, queries).tolist()
    for listed, groups in zip(lists, by_paper(method, keys, queries), strict=True):
        wanted = [n for group in groups for n in group]
        assert len(set(wanted)) == len(wanted) == method.count
        assert sorted(listed) == sorted(wanted)


def test_chunks_are_those_of_the_paper():
    for seed in range(4):
        law_paper(built("shadowkv", **OPTIONS), seed)


@pytest.mark.parametrize("what", ["likeness", "landmark", "vote"])
def test_another_choice_is_caught(what):
    class Broken(Shadowkv):
        def summary(self, keys):
            found = super().summary(keys)
            if what == "likeness":
                found[what] = -found[what]
            elif what == "landmark":
                found[what] = keys[:, :, :, 0]
            return found

        def vote(self, scores, seen):
            return scores.sum(2) if what == "vote" else super().vote(scores, seen)

    with pytest.raises(AssertionError):
        for seed in range(4):
            law_paper(Broken(**OPTIONS), seed)


def test_what_is_no_number_is_read():
    method, (keys, queries) = built("shadowkv", **OPTIONS), case()
    keys[0, 50, 3] = torch.nan
    lists = chosen(method, keys, queries)
    assert 12 in lists[0].tolist()
    assert len(set(lists[0].tolist())) == len(set(lists[1].tolist())) == method.count


def test_every_way_through_a_session_is_that_of_the_oracle():
    small = {"use": "shadowkv", **Shadowkv.small, "dense_layers": 1}
    with accel.optimize(llama(2), {"kv": {"select": small}}, max_context=128, max_batch=2) as made:
        law_every_target(made)
        homes = {s.name for s in made.artifact.state if s.home is Home.MAPPED}
        assert homes == {"kv.1.v"}
        per_token = 8 + 2 * 2 * 2 * 10 * 4 + 2 * (10 + 1) * 4 / 4
        assert made.report["kv_bytes_per_token"] == per_token
        assert made.report["kv_mapped_per_token"] == 2 * 10 * 4
        with made.session(batch=2) as session:
            session.run([[5] * 20] * 2)
            assert session.stats["kv_bytes"] == 2 * 256 * per_token
            assert session.stats["kv_mapped"] == 2 * 256 * 2 * 10 * 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"outliers": -1}, "outliers = -1; give 0 or more"),
        ({"local": -1}, "local = -1; give 0 or more"),
        ({"outliers": 5000}, "outliers = 5000"),
        ({"page": 6}, "page = 6"),
        ({"tokens_read": 0}, "tokens_read = 0"),
        ({"outlier": 3}, "did you mean 'outliers'"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    with pytest.raises(RecipeError, match=why):
        accel.optimize(
            models.tiny(), {"kv": {"select": {"use": "shadowkv", **options}}}, max_context=64
        )
