"""Laws of scores: what a token is worth depends on its row alone, and empty slots do not count."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.ops.attention import Form
from accel.passes.kv.score import Base
from accel.passes.kv.score._window import pooled

from .. import kv_slots
from ..kv_slots import AXES, SCALE, C, D, G, P, build, choose, named, real, sets, slots, taken

NAMES = AXES["score"].names()
SCORES = [(n, o) for n in NAMES for o in ({}, *AXES["score"].method(n).others)]
each_score = pytest.mark.parametrize(
    ("name", "options"), SCORES, ids=lambda x: x if isinstance(x, str) else ",".join(x) or "small"
)
some = settings(max_examples=6, deadline=None, derandomize=True)
seeds = st.integers(0, 1 << 20)
PER_SLOT = ("mass", "decode_mass", "entropy", "notes")
TOLD = [f"kept_{name}{part}" for name in PER_SLOT for part in ("", ".recent")]


# Laws, of any score


def law_budget(score, seed, nested=True, **more):
    """So many of the real tokens as the budget says; a smaller budget keeps some of the same."""
    x, before = slots(seed), None
    for kept in (1, 2, 5, 9, 16, 40):
        found = sets(choose(x, kept, score, **more))
        for mine, there in zip(sum(found, []), sum(real(x), []), strict=True):
            assert mine <= there and len(mine) == min(kept, len(there))
        if nested and before is not None:
            assert all(a <= b for a, b in zip(sum(before, []), sum(found, []), strict=True))
        before = found
    assert before == real(x)


def law_rows(score, seed, **more):
    """A row alone, or elsewhere in the batch, keeps the same."""
    x = slots(seed)
    want = sets(choose(x, 7, score, **more))
    for order in ([2, 0, 1], [1], [2]):
        assert sets(choose(taken(x, order), 7, score, **more)) == [want[i] for i in order]
    louder = {n: v.clone() for n, v in x.items()}
    for name in ("recent_k", "kept_k", "queries", *TOLD):
        louder[name][1] *= 1000
    assert [sets(choose(louder, 7, score, **more))[i] for i in (0, 2)] == [want[0], want[2]]


def law_empty(score, seed, **more):
    """What lies in slots that hold no token, and how many of them there are, changes nothing."""
    x = slots(seed)
    want = sets(choose(x, 7, score, **more))
    loud = {n: v.clone() for n, v in x.items()}
    for part, where in (
        ("kept", x["kept_pos"]),
        ("recent", x["recent_pos"][:, None].expand(-1, G, -1)),
    ):
        gone = (where < 0) | (where >= x["seen"][:, None, None])
        for name in ("k", "v"):
            loud[f"{part}_{name}"][gone] = 50.0
        for told in PER_SLOT:
            loud[f"kept_{told}" + (".recent" if part == "recent" else "")][gone] = 1e6
    loud["queries"][x["query_positions"] < 0] = 50.0
    assert sets(choose(loud, 7, score, **more)) == want
    wide = {n: v for n, v in x.items()}
    for name, value in x.items():
        if name.startswith("kept") and not name.endswith(".recent"):
            empty = torch.full(
                (*value.shape[:2], 5, *value.shape[3:]), -1 if name == "kept_pos" else 9.0
            )
            wide[name] = torch.cat((value, empty.to(value.dtype)), dim=2)
    assert sets(choose(wide, 7, score, **more)) == want


def law_protected(score, seed, **more):
    """The first and the newest stay; where there is no room for both, first the first, then the newest."""
    x = slots(seed, base=(0, 0, 0), recent=(16, 9, 3))
    order = [*range(score.sinks), *(-1 - i for i in range(score.recent))]
    for kept in (1, 3, 6, 9):
        for row, n in zip(sets(choose(x, kept, score, **more)), x["seen"].tolist(), strict=True):
            must = {p % n for p in order[:kept] if -n <= p < n}
            assert all(must <= head for head in row), (must, row)


def law_no_number(score, seed, **more):
    """A token of no number is the first to go, harms no other row, and is better than nothing."""
    x = slots(seed, base=(0, 0, 0), recent=(12, 12, 12))
    clean = sets(choose(x, 6, score, **more))
    x = {n: v.clone() for n, v in x.items()}
    x["recent_k"][1, :, 5] = float("nan")
    x["recent_v"][1, :, 5] = float("nan")
    for name in PER_SLOT:
        x[f"kept_{name}.recent"][1, :, 5] = float("nan")
    found = sets(choose(x, 6, score, **more))
    assert (found[0], found[2]) == (clean[0], clean[2])
    assert all(len(head) == 6 for head in found[1])
    if set(kv_slots.parameters(score)) & {
        "keys",
        *PER_SLOT,
    } and "queries" not in kv_slots.parameters(score):
        assert all(5 not in head for head in found[1])
    assert sets(choose(x, 12, score, **more)) == real(x)


LAWS = [law_budget, law_rows, law_empty, law_protected, law_no_number]


@each_score
@pytest.mark.parametrize("law", LAWS)
@some
@given(seed=seeds)
def test_law(law, name, options, seed):
    law(build("score", name, **options), seed)


@each_score
@some
@given(seed=seeds)
def test_scores_are_finite_numbers_of_each_slot(name, options, seed):
    score, x = build("score", name, **options), slots(seed)
    values = named(x) | kv_slots.constants(score)
    found = score(**{n: values[n] for n in kv_slots.parameters(score)})
    assert found.shape == (3, G, P + C) and found.isfinite().all()


# Broken ones


class AcrossRows(Base):
    def __call__(self, keys, positions):
        return -(keys.norm(dim=-1) - keys.norm(dim=-1).mean(0)).abs()


class SeesEmpty(Base):
    def __call__(self, keys, positions):
        return (keys @ keys.sum(2)[..., None])[..., 0]


class PrefersNothing(Base):
    def __call__(self, keys, positions):
        return torch.nan_to_num(-keys.norm(dim=-1), nan=1.0)


@pytest.mark.parametrize(
    "law, broken", [(law_rows, AcrossRows), (law_empty, SeesEmpty), (law_no_number, PrefersNothing)]
)
def test_the_law_catches(law, broken):
    with pytest.raises(AssertionError):
        for seed in range(5):
            law(broken(), seed)


def test_the_laws_of_budget_and_protection_catch(monkeypatch):
    from accel.passes.kv import chooser

    monkeypatch.setattr(chooser, "_protected", lambda score, scores, where, seen: scores)
    for law, score in (
        (law_budget, build("score", "knorm")),
        (law_protected, build("score", "h2o")),
    ):
        with pytest.raises(AssertionError):
            for seed in range(5):
                law(score, seed)


# One method each


@some
@given(seed=seeds, turn=st.floats(0.1, 3))
def test_knorm_is_blind_to_rotation_and_values(seed, turn):
    x = slots(seed)
    want = sets(choose(x, 6, build("score", "knorm")))
    for part in ("recent", "kept"):
        k = x[f"{part}_k"]
        a, b = k[..., : D // 2], k[..., D // 2 :]
        c, s = np.cos(turn), np.sin(turn)
        x[f"{part}_k"] = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
        x[f"{part}_v"] = x[f"{part}_v"] * 7
    assert sets(choose(x, 6, build("score", "knorm"))) == want
    x["recent_k"] = x["recent_k"] * torch.linspace(0.2, 3, C)[:, None]
    assert sets(choose(x, 6, build("score", "knorm"))) != want


@some
@given(seed=seeds)
def test_snapkv_of_one_query_ranks_by_its_attention(seed):
    x = slots(seed, base=(0, 0, 0), recent=(14, 11, 9))
    x |= {n: x[n][:, -1:] for n in ("queries", "query_positions")}
    found = sets(choose(x, 5, build("score", "snapkv", window=1, kernel=1)))
    for row, n in enumerate(x["seen"].tolist()):
        q = x["queries"][row, -1].view(G, 2, D).numpy()
        for head in range(G):
            k = x["recent_k"][row, head, :n].numpy()
            e = np.exp(q[head] @ k.T * SCALE)
            drawn = (e / e.sum(1, keepdims=True)).mean(0)[:-1]  # the query's own stays
            assert found[row][head] == {n - 1, *np.argsort(-drawn)[:4].tolist()}


@some
@given(seed=seeds)
def test_snapkv_looks_with_every_query_that_there_is(seed):
    """What the window gives a head in all, before neighbours share it, is at most one per query."""
    x = slots(seed)
    known = named(x)
    where = known["positions"]
    probs = known["attends"](known["queries"], known["query_positions"])
    total = probs.sum(-1)  # [B,G,R,W]
    there = (x["query_positions"] >= 0)[:, None, None].expand(total.shape)
    torch.testing.assert_close(total[there], torch.ones_like(total[there]))
    assert not total[~there].any()
    assert not probs[(where < 0)[:, :, None, None].expand(probs.shape)].any()
    late = where[:, :, None, None] > x["query_positions"][:, None, None, :, None]
    assert not probs[late.expand(probs.shape)].any()


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_pooling_is_over_tokens_not_slots(pooling, kernel):
    scores = torch.rand(1, 1, 1, 12, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[[0, 1, 4, -1, -1, 5, 6, 7, -1, 8, 9, -1]]])
    full = positions[0, 0] >= 0
    found = pooled(scores, positions, kernel, pooling)[0, 0, 0, full]
    line = torch.nn.functional.pad(scores[0, 0, 0, full], (kernel // 2, kernel // 2)).unfold(
        0, kernel, 1
    )
    torch.testing.assert_close(found, line.amax(1) if pooling == "max" else line.mean(1))


def test_streaming_llm_keeps_the_first_and_the_newest():
    x = slots(0, base=(0, 0, 0), recent=(16, 9, 3))
    found = sets(choose(x, 6, build("score", "streaming-llm")))
    for row, n in zip(found, (16, 9, 3), strict=True):
        assert row == [{p for p in range(n) if p < 2 or p >= n - 4}] * G


def test_h2o_without_heavy_hitters_is_a_window():
    x = slots(0, base=(0, 0, 0), recent=(16, 9, 3))
    for row, n in zip(sets(choose(x, 4, build("score", "h2o"))), (16, 9, 3), strict=True):
        assert row == [set(range(max(0, n - 4), n))] * G


@pytest.mark.parametrize("kind, size", [("window", 6), ("chunk", 8)])
def test_what_no_later_query_sees_goes_first(kind, size):
    x = slots(1)
    for name in NAMES:
        for row, n in zip(
            sets(choose(x, 20, build("score", name), form=Form(kind, size, SCALE))),
            x["seen"].tolist(),
            strict=True,
        ):
            first = n - size + 1 if kind == "window" else n // size * size
            want = [
                {p for p in there if p >= first} for there in real(x)[x["seen"].tolist().index(n)]
            ]
            assert row == want
