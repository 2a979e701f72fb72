"""Laws of what becomes of tokens that go: the same stay, and values are mixtures of what was there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import PassError, RecipeError
from accel.passes.kv.inputs import call
from accel.passes.kv.keep import Base
from accel.passes.kv.keep.less import Less

from ..kv_case import evicting, recipe
from ..kv_slots import AXES, SCALE, B, C, D, G, R, absorbing, build, choose, slots, taken

NAMES = AXES["keep"].names()
some = settings(max_examples=10, deadline=None, derandomize=True)
seeds = st.integers(0, 1 << 20)


def kept(keep, x, count=5):
    if keep.demotes:
        x = x | no_others(keep)
    return choose(x, count, build("score", "snapkv"), keep=keep, most=count)


def no_others(keep):
    """What `compress` takes where nothing was demoted yet."""
    kinds = {"uint8": torch.uint8, "float16": torch.float16}
    parts = {
        f"kept_low.{role}.{part}".rstrip("."): torch.zeros(B, G, 0, count, dtype=kinds[dtype])
        for role in "kv"
        for part, (dtype, count) in keep.parts(D).items()
    }
    return parts | {"kept_low.pos": torch.full((B, G, 0), -1)}


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
    loud = {n: v.clone() for n, v in x.items()}
    gone = (x["recent_pos"] < 0) | (x["recent_pos"] >= x["seen"][:, None])
    for name in ("recent_k", "recent_v"):
        loud[name][gone[:, None].expand(-1, G, -1)] = 40.0
    for name in ("kept_k", "kept_v"):
        loud[name][x["kept_pos"] < 0] = 40.0
        loud[name][1] *= -3
    found = kept(keep, loud)
    for row in (0, 2):
        real = want["pos"][row] >= 0
        torch.testing.assert_close(found["v"][row][real], want["v"][row][real])


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


LAWS = [law_state, law_mixture, law_apart, law_nothing_goes, law_rows]
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
        with pytest.raises(RecipeError, match="value-merge: threshold is .*; give a cosine"):
            AXES["keep"].build("value-merge", threshold=bad)


def test_values_that_are_keys_are_not_merged(stateful):
    with pytest.raises(PassError, match="the values of layer 0 are also its keys"):
        evicting(stateful("plain_latent"), recipe(keep="value-merge"))
