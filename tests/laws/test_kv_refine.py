"""Laws of refines: those of scores, after any score; and what a chain is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import RecipeError
from accel.passes.kv.refine import Base

from ..kv_slots import AXES, B, G, build, choose, named, parameters, sets, slots
from .test_kv_score import LAWS, law_empty, law_no_number, law_rows

NAMES = AXES["refine"].names()
BASES = ("snapkv", "knorm", "h2o")  # shares of attention, numbers below 0, sums
some = settings(max_examples=4, deadline=None, derandomize=True)
seeds = st.integers(0, 1 << 20)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("law", LAWS)
@some
@given(seed=seeds)
def test_law(law, name, seed):
    more = {"nested": False} if law is LAWS[0] else {}
    law(build("score", BASES[seed % 3]), seed, refine=build("refine", name), **more)


@pytest.mark.parametrize("name", NAMES)
@some
@given(seed=seeds)
def test_scores_are_finite_numbers_of_each_slot(name, seed):
    refine, x = build("refine", name), slots(seed)
    found = refine(**refined(refine, x, build("score", BASES[seed % 3])))
    assert found.shape == (B, G, x["kept_pos"].shape[2] + x["recent_pos"].shape[1])
    assert found.isfinite().all()


def refined(refine, x, score, kept=7):
    """The parameters of a refine after a score."""
    values = named(x, kept)
    real = values["positions"] >= 0
    age = values["seen"][:, None, None] - 1 - values["positions"]
    scores = score(**{name: values[name] for name in parameters(score)}).float()
    least = scores.masked_fill(~real, 1e30).amin(2, keepdim=True)
    values |= {
        "scores": torch.where(real, scores, least.masked_fill(~real.any(2, keepdim=True), 0)),
        "protected": real & ((values["positions"] < score.sinks) | (age < score.recent)),
        "counts": torch.full((B, G), kept),
        "ranks": torch.arange(kept),
    }
    return {name: values[name] for name in parameters(refine)}


class AcrossRows(Base):
    def __call__(self, scores):
        return scores - scores.mean(0)


class SeesEmpty(Base):
    def __call__(self, scores, keys):
        return (keys @ keys.sum(2)[..., None])[..., 0]


@pytest.mark.parametrize("law, broken", [(law_rows, AcrossRows), (law_empty, SeesEmpty)])
def test_the_law_catches(law, broken):
    with pytest.raises(AssertionError):
        for seed in range(5):
            law(build("score", "knorm"), seed, refine=broken())


def test_what_a_score_gave_no_number_stays_last(monkeypatch):
    """The law of numbers fails where a refine alone says what such a token is worth."""
    from accel.passes.kv import chooser

    class Same(Base):
        def __call__(self, scores):
            return -scores  # the lowest first

    law_no_number(build("score", "knorm"), 0, refine=Same())
    whole = chooser._refined
    monkeypatch.setattr(
        chooser,
        "_refined",
        lambda step, x: whole(step, {**x, "scores": x["scores"].nan_to_num(-99.0)}),
    )
    with pytest.raises(AssertionError):
        law_no_number(build("score", "knorm"), 0, refine=Same())


def test_a_chain_is_one_method_after_another():
    class Times(Base):
        def __call__(self, scores, values):
            return -scores * values.norm(dim=-1)

    class Plus(Base):
        def __call__(self, scores, keys):
            return scores + keys[..., 0]

    x, score = slots(3, base=(0, 0, 0), recent=(14, 11, 9)), build("score", "knorm")
    norm = -x["recent_k"].norm(dim=-1)
    want = -norm * x["recent_v"].norm(dim=-1) + x["recent_k"][..., 0]
    for refine, scores in (
        (Times(then=Plus()), want),
        (Plus(then=Times()), -(norm + x["recent_k"][..., 0]) * x["recent_v"].norm(dim=-1)),
    ):
        found = sets(choose(x, 5, score, refine=refine))
        for row, n in enumerate(x["seen"].tolist()):
            for head in range(G):
                assert found[row][head] == set(scores[row, head, :n].topk(5).indices.tolist())


def test_a_recipe_names_a_chain():
    axis = AXES["refine"]
    chain = axis.build("graphkv", then={"use": "critical-kv", "share": 0.25}).chain
    assert [type(one).__name__ for one in chain] == ["GraphKV", "CriticalKV"]
    assert chain[1].share == 0.25 and hash(chain[0]) == hash(chain[0])
    bad = {
        "then is 3; give the table": 3,
        "then is .*; give the table": {"share": 0.5},
        "kv.refine method": {"use": "graph"},
        "kv.refine.critical-kv option": {"use": "critical-kv", "part": 1},
        "share is 2": {"use": "critical-kv", "share": 2.0},
    }
    for message, then in bad.items():
        with pytest.raises(RecipeError, match=message):
            axis.build("graphkv", then=then)
