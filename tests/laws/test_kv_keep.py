"""Laws of what becomes of tokens that go: the same stay, and values are mixtures of what was there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import PassError, RecipeError
from accel.passes.kv._shared import low
from accel.passes.kv._shared.low import forms
from accel.passes.kv.inputs import call
from accel.passes.kv.keep import Base
from accel.passes.kv.keep.less import Less
from accel.passes.kv.keep.zipcache import Separated, ZipCache

from ..kv_case import evicting, recipe
from ..kv_slots import (
    AXES,
    SCALE,
    B,
    C,
    D,
    G,
    R,
    absorbing,
    build,
    choose,
    real,
    sets,
    slots,
    taken,
)

NAMES = AXES["keep"].names()
some = settings(max_examples=10, deadline=None, derandomize=True)
seeds = st.integers(0, 1 << 20)


def kept(keep, x, count=5):
    if keep.demotes:
        x = no_others(keep) | x
    return choose(x, count, build("score", "snapkv"), keep=keep, most=count)


def no_others(keep):
    """What `compress` takes where nothing was demoted yet."""
    widths = {"k": D, "v": D}
    states = [form.states(0, G, widths) for form in forms(keep)]
    return {f"kept_{n}": s.allocate(B=B) for each in states for n, s in each.items()}


def law_mixture(keep, seed):
    """A value is a convex combination: it lies within what all values span, and equal values stay."""
    x = slots(seed, base=(0, 0, 0), recent=(14, 11, 9))
    found = kept(keep, x)
    want, real = kept(build("keep", "drop"), x)["pos"], (found["pos"] >= 0)[..., None]
    assert torch.equal(
        found["pos"] >= 0 if keep.moves else found["pos"], want >= 0 if keep.moves else want
    )
    for row, n in enumerate((14, 11, 9)):
        low, high = x["recent_v"][row, :, :n].amin(1), x["recent_v"][row, :, :n].amax(1)
        value = found["v"][row]
        inside = (value >= low[:, None] - 1e-5) & (value <= high[:, None] + 1e-5)
        assert (inside | ~real[row]).all()
    x["recent_v"] = torch.ones_like(x["recent_v"])
    torch.testing.assert_close(kept(keep, x)["v"], torch.ones(B, G, 5, D))


def law_apart(keep, seed):
    """Where no key is like another, nothing is merged."""
    x = slots(seed, base=(0, 0, 0), recent=(6, 5, 6))
    x["recent_k"] = torch.eye(C)[None, None, :, :D].expand(B, G, -1, -1).clone()
    want = kept(build("keep", "drop"), x, 3)
    torch.testing.assert_close(kept(keep, x, 3)["v"], want["v"])


def law_nothing_goes(keep, seed):
    """Where every token stays, values do."""
    x = slots(seed)
    want = choose(x, 99, build("score", "snapkv"))
    x = x | no_others(keep) if keep.demotes else x
    found = choose(x, 99, build("score", "snapkv"), keep=keep)
    assert torch.equal(want["v"], found["v"])


def law_rows(keep, seed):
    """Empty slots, and other rows, leave no trace."""
    x = slots(seed)
    want = kept(keep, x)
    found = kept(keep, loud(x))
    for row in (0, 2):
        real = want["pos"][row] >= 0
        torch.testing.assert_close(found["v"][row][real], want["v"][row][real])


def loud(x):
    """The same slots with other numbers where nothing lies, and in the second row."""
    found = {n: v.clone() for n, v in x.items()}
    gone = (x["recent_pos"] < 0) | (x["recent_pos"] >= x["seen"][:, None])
    for name in ("recent_k", "recent_v"):
        found[name][gone[:, None].expand(-1, G, -1)] = 40.0
    for name in ("kept_k", "kept_v"):
        found[name][x["kept_pos"] < 0] = 40.0
        found[name][1] *= -3
    return found


def demoted(keep, found):
    """(form, row, head) -> positions, in their order, and the keys and values [n,2D] that attention reads there."""
    held = {}
    for form in forms(keep):
        both = torch.cat([form.decode(role, D, found) for role in "kv"], dim=3)
        where = found[f"low.pos.{form.name}".rstrip(".")]
        for b, g in ((b, g) for b in range(B) for g in range(G)):
            there = where[b, g] >= 0
            held[form.name, b, g] = where[b, g][there].tolist(), both[b, g][there]
    return held


def law_demoted(keep, seed):
    """Each token stays, or is in one of the forms, which are of the sizes that are declared; numbers in slots that hold
    nothing, and of other rows, do not change what is read; and nothing that was demoted changes any more.
    """
    if not keep.demotes:
        return
    x = slots(seed) | no_others(keep)
    first = kept(keep, x)
    read, stay = demoted(keep, first), sets(first)
    for b, row in enumerate(real(x)):
        for g, tokens in enumerate(row):
            each = [*stay[b][g], *(p for f in forms(keep) for p in read[f.name, b, g][0])]
            assert len(each) == len(tokens) and set(each) == tokens
    for form in forms(keep):
        for name, state in form.states(0, G, {"k": D, "v": D}).items():
            found = first[name]
            assert found.dtype == getattr(torch, state.dtype)
            assert found.shape[3:] == torch.Size(state.shape[3:])
    other = demoted(keep, kept(keep, loud(x)))
    for place, (tokens, found) in read.items():
        if place[1] != 1:
            assert other[place][0] == tokens
            torch.testing.assert_close(other[place][1], found)
    later = x | {f"kept_{n}": t for n, t in first.items() if n.startswith("low.")}
    later["kept_pos"] = torch.full_like(x["kept_pos"], -1)
    for name in ("recent_pos", "query_positions"):
        later[name] = torch.where(x[name] >= 0, x[name] + 40, x[name])
    later["seen"] = x["seen"] + 40
    again = demoted(keep, kept(keep, later))
    for place, (tokens, found) in read.items():
        assert again[place][0][: len(tokens)] == tokens
        assert torch.equal(again[place][1][: len(tokens)], found)


def read_back(keep, found, x, seed=0):
    """What queries find in a state after `compress`, and its log-sum-exp."""
    told = absorbing(keep)
    state = {n.removeprefix("kept_absorbed."): t for n, t in told.items() if "absorbed." in n}
    state |= {n.removeprefix("absorbed."): t for n, t in found.items() if "absorbed." in n}
    own = {n.removeprefix("table."): t for n, t in told.items() if n.startswith("table.")}
    queries = torch.randn(B, G * R, 3, D, generator=torch.Generator().manual_seed(seed))
    return call(keep.read, {**own, **state, "queries": queries, "scale": SCALE, "softcap": 0.0})


def law_state(keep, seed):
    """A state is as large after an eviction as before; one of nothing weighs nothing; finite numbers come back; and
    what the first row evicts says nothing to the third.
    """
    if not keep.absorbs:
        return
    x, least = slots(seed), torch.finfo(torch.float32).min
    held = {n.removeprefix("kept_"): t for n, t in absorbing(keep).items() if "absorbed." in n}
    none, some = choose(x, 99, build("score", "snapkv"), keep=keep), kept(keep, x)
    for name, before in held.items():
        assert torch.equal(none[name], before) and some[name].shape == before.shape
        assert not torch.equal(some[name], before)
    assert (read_back(keep, none, x)[1] == least).all()
    value, lse = read_back(keep, some, x)
    assert value.isfinite().all() and lse.isfinite().all() and (lse[0] > least).all()
    x["recent_k"][0, :, 2], x["recent_v"][0, :, 3] = float("nan"), torch.inf
    other = kept(keep, x)
    assert all(other[n].isfinite().all() and torch.equal(other[n][2], some[n][2]) for n in held)
    assert all(t.isfinite().all() for t in read_back(keep, other, x))


LAWS = [law_demoted, law_state, law_mixture, law_apart, law_nothing_goes, law_rows]
AVERAGES = [law_mixture, law_apart]  # of values that a keep does not add up


@pytest.mark.parametrize(
    "law, name",
    [
        (law, name)
        for law in LAWS
        for name in NAMES
        if not (law in AVERAGES and AXES["keep"].method(name).adds)
    ],
)
@some
@given(seed=seeds)
def test_law(law, name, seed):
    law(build("keep", name), seed)


def gathered(values, chosen):
    return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))


class Sums(Base):
    """Adds what goes, without weights."""

    def __call__(self, values, chosen, real):
        return gathered(values, chosen) + values.sum(2, keepdim=True)


class Reorders(Base):
    def __call__(self, values, chosen, positions):
        return gathered(values, chosen.flip(2))


class Doubles(Base):
    def __call__(self, values, chosen):
        return gathered(values, chosen) * 1.5


class Leaks(Less):
    """Tokens that stay are absorbed, too."""

    def absorb(self, sums, keys, values, gone, k1, k2, k3, s1, s2):
        return super().absorb(sums, keys, values, gone | True, k1, k2, k3, s1, s2)


class Floor(Less):
    """What nothing weighs is little, and not nothing."""

    def read(self, queries, sums, q1, q2):
        value, lse = super().read(queries, sums, q1, q2)
        return value, lse.clamp(min=-14)


class Loud(Separated):
    """Steps of a channel go by all slots, whatever they hold."""

    def encode(self, x, joins, role):
        return super().encode(x, joins | True, role)


class Among(ZipCache):
    @property
    def tiers(self):
        return {"salient": Loud(4), "rest": Loud(2)}


class Evicts(ZipCache):
    def tier(self, gone, scores):
        return super().tier(gone, scores) - 1


@pytest.mark.parametrize("broken", [Among, Evicts])
def test_the_law_of_forms_catches(broken):
    with pytest.raises(AssertionError):
        law_demoted(broken(), 0)


def test_the_law_of_forms_catches_one_that_reads_what_came_before_by_newer_steps(monkeypatch):
    monkeypatch.setattr(low, "_number", lambda given: given[..., 0].long() * 0 + given.max().long())
    with pytest.raises(AssertionError):
        law_demoted(ZipCache(), 0)


@pytest.mark.parametrize("broken", [Leaks, Floor])
def test_the_law_of_states_catches(broken):
    with pytest.raises(AssertionError):
        law_state(broken(), 0)


@pytest.mark.parametrize(
    "law, broken",
    [(law_mixture, Doubles), (law_apart, Sums), (law_nothing_goes, Reorders), (law_rows, Sums)],
)
def test_the_law_catches(law, broken):
    with pytest.raises(AssertionError):
        for seed in range(4):
            law(broken(), seed)


def test_value_merge_by_hand():
    """One token goes; its value moves that of the key that is most like its own."""
    x = taken(slots(0, (0, 0, 0), (3, 3, 3)), slice(1))
    keys = torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0.8, 0.6, 0, 0, 0, 0]])
    x["recent_k"][:, :, :3] = keys
    v = x["recent_v"][0, 0, :3]
    found = choose(
        x, 2, build("score", "streaming-llm", sinks=2), keep=build("keep", "value-merge"), most=2
    )
    share = 0.8 * v[2].norm() / (v[2].norm() + v[0].norm() + 1e-6)
    torch.testing.assert_close(
        found["v"][0, 0], torch.stack(((v[0] + share * v[2]) / (1 + share), v[1]))
    )
    strict = build("keep", "value-merge", threshold=0.9)
    found = choose(x, 2, build("score", "streaming-llm", sinks=2), keep=strict, most=2)
    assert torch.equal(found["v"][0, 0], v[:2])


def test_a_cosine_is_a_cosine():
    for bad in (1.5, -2.0, float("nan")):
        with pytest.raises(RecipeError, match="value-merge: threshold is .*; give -1 to 1"):
            AXES["keep"].build("value-merge", threshold=bad)


def test_values_that_are_keys_are_not_merged(stateful):
    with pytest.raises(PassError, match="the values of layer 0 are also its keys"):
        evicting(stateful("plain_latent"), recipe(keep="value-merge"))
