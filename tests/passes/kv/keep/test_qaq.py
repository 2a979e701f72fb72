"""qaq: as few bits of each key and value as the error allows that attention can bear."""

import math

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import RecipeError
from accel.passes.kv._shared.low import forms
from accel.passes.kv.inputs import call
from accel.passes.kv.keep.qaq import QAQ

from ....kv_case import state
from ....kv_slots import SCALE, D, G, build, choose, named, slots
from ....laws.test_kv_keep import demoted, no_others
from ....session_ways import oracle, singles

WIDE = {"least_bits": 1, "most_bits": 8, "window": 2}


def bits(keep, x):
    """Bits of the keys and of the values of all slots [2,B,G,S]; which slots hold a token."""
    number, count = call(keep.tier, named(x)), len(keep.levels)
    levels = torch.tensor(keep.levels)
    return levels[torch.stack((number // count, number % count))], named(x)["positions"] >= 0


def law_bits_fall(keep_of, seed=0):
    """The larger the error that is allowed, the fewer bits has each key and each value."""
    x = slots(seed)
    found = [bits(keep_of(error), x) for error in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)]
    means = []
    for (some, real), (fewer, _) in zip(found, found[1:], strict=False):
        assert (fewer <= some)[:, real].all()
        means.append(some[:, real].float().mean())
    assert means[0] > means[2] > means[-1] >= 1


def test_a_key_may_be_off_by_what_its_product_may_be():
    """Queries c times as large allow a c-th of the error, whatever the unit of keys; values do not depend on it."""
    x = named(slots(1, base=(0, 0, 0), recent=(14, 11, 12)))
    asked = {n: x[n] for n in ("query_positions", "keys", "seen", "attends")}
    same = lambda queries, positions: x["attends"](x["queries"], positions)  # noqa: E731
    one, other = (
        QAQ().allowed(**{**asked, "queries": x["queries"] * c, "attends": same}) for c in (1, 4)
    )
    torch.testing.assert_close(other[0] * 4, one[0])
    torch.testing.assert_close(other[1], one[1])


class Inverse(QAQ):
    """What may be far off is kept near."""

    def allowed(self, *asked):
        key, value = super().allowed(*asked)
        return 1 / key, 1 / value


@pytest.mark.parametrize("seed", range(2))
def test_bits_fall_as_the_error_rises(seed):
    law_bits_fall(lambda error: QAQ(error=error, **WIDE), seed)
    with pytest.raises(AssertionError):
        law_bits_fall(lambda error: Inverse(error=error, **WIDE), seed)


def law_formula(keep, seed=1):
    """Bits as the paper says, by loops over tokens, rounded up to a width that there is."""
    x = slots(seed, base=(0, 0, 0), recent=(14, 11, 12))
    found, _ = bits(keep, x)
    first = x["kept_k"].shape[2]
    for b, n in enumerate(x["seen"].tolist()):
        for g in range(G):
            q, keys = x["queries"][b, -keep.window :, 2 * g : 2 * g + 2], x["recent_k"][b, g]
            norm = max(q[:, i].square().sum(-1).mean() for i in range(2))
            hidden = torch.arange(16) > x["query_positions"][b, -keep.window :, None]
            shares = torch.einsum("whd,sd->hws", q, keys) * SCALE
            most = shares.masked_fill(hidden, -torch.inf).softmax(-1).amax((0, 1))
            for t in range(n):
                far = (
                    math.sqrt(12 / norm * math.log(n**3 / (n - 1) * keep.error**2 + 1)),
                    math.sqrt(12 / n) * keep.error / max(most[t], 1e-9),
                )
                for role, allowed in enumerate(far):
                    v = x["recent_" + "kv"[role]][b, g, t].sort().values
                    ends = math.ceil(keep.outliers / 2 * D)
                    span = float(v[D - 1 - ends] - v[ends])
                    want = math.log2(span / (2 * allowed) + 1)
                    want = next((w for w in keep.levels if w >= want), keep.most_bits)
                    want = keep.most_bits if t > n - keep.window else want
                    assert int(found[role, b, g, first + t]) == want


def test_bits_are_those_of_the_paper():
    for error in (0.2, 1.0, 4.0):
        law_formula(QAQ(error=error, **WIDE))
        law_formula(QAQ(error=error, outliers=0.0, **WIDE))
    with pytest.raises(AssertionError):
        law_formula(Inverse(error=0.2, **WIDE))


def law_within(keep, seed=0):
    """No number is farther off than is allowed, but of vectors that would need more bits than there are; outliers are
    as they were.
    """
    x = slots(seed, base=(0, 0, 0), recent=(14, 11, 12))
    far = call(keep.allowed, named(x))
    read = demoted(keep, choose(x | no_others(keep), 1, build("score", "knorm"), keep=keep, most=1))
    first, many = x["kept_k"].shape[2], 0
    for (name, b, g), (tokens, found) in read.items():
        for role, allowed in enumerate(far):
            given = x["recent_" + "kv"[role]][b, g, tokens]
            off = (found[:, role * D : role * D + D] - given).abs()
            if ends := math.ceil(keep.outliers / 2 * D):
                order = given.argsort(dim=1)
                sides = torch.cat((order[:, :ends], order[:, D - ends :]), dim=1)
                assert (off.gather(1, sides) <= given.gather(1, sides).abs() * 2**-10).all()
            if name.split("v")[role].lstrip("k") != str(keep.most_bits):
                limit = allowed[b, g].expand(first + 16)[first:][tokens]
                assert (off <= limit[:, None] * 1.01 + 4e-3).all()
                many += len(tokens)
    assert many > 20


def test_errors_are_within_what_is_allowed():
    law_within(QAQ(error=1.0, **WIDE))
    law_within(QAQ(error=1.0, outliers=0.0, **WIDE))

    class Less(QAQ):  # a level fewer than is needed
        @property
        def tiers(self):
            return dict(zip(super().tiers, list(super().tiers.values())[:1] * 16, strict=True))

    with pytest.raises(AssertionError):
        law_within(Less(error=0.3, **WIDE))


def test_one_number_of_bits_is_uniform():
    """As `mikv` without groups: a vector in 2^bits - 1 steps between its ends."""
    keep, x = QAQ(least_bits=4, most_bits=4, outliers=0.0), slots(3, (0, 0, 0), (14, 11, 12))
    assert [form.name for form in forms(keep)] == ["k4v4"]
    found = choose(x | no_others(keep), 1, build("score", "knorm"), keep=keep, most=1)
    for (_, b, g), (tokens, read) in demoted(keep, found).items():
        for role in range(2):
            v = x["recent_" + "kv"[role]][b, g, tokens]
            low, step = v.amin(1, keepdim=True), (v.amax(1) - v.amin(1))[:, None] / 15
            want = ((v - low) / step).round() * step + low
            off = (read[:, role * D : role * D + D] - want).abs()
            assert (off > 8e-3).float().mean() < 0.03  # a number between two codes
            assert ((want - v).abs() > 8e-3).float().mean() > 0.5


def test_an_outlier_takes_no_bits_from_the_others():
    x = slots(5, (0, 0, 0), (14, 11, 12))
    x["recent_v"][..., 2] = 60.0
    with_outliers, without = (bits(QAQ(error=1.0, outliers=o, **WIDE), x) for o in (0.01, 0.0))
    real = with_outliers[1]
    assert (with_outliers[0][1] <= without[0][1])[real].all()
    assert with_outliers[0][1][real].float().mean() < without[0][1][real].float().mean() - 1


@pytest.mark.long
def test_graphs_give_what_the_oracle_does_in_the_bytes_of_the_formula():
    tables = {"kv": {"score": {"use": "streaming-llm", "sinks": 0}}}
    tables["kv"] |= {"keep": {"use": "qaq", "window": 2, "error": 0.3}}
    tables["kv"] |= {"budget": {"use": "uniform", "tokens_kept": 2}}
    tables["kv"] |= {"when": {"use": "generated", "tokens": 4}}
    tokens = np.random.default_rng(0).permutation(50)[None, :46].repeat(2, 0)
    model = models.make("llama", 2)
    with accel.optimize(model, tables, max_context=128, max_batch=2) as compiled:
        eager = oracle(compiled)
        found = []
        for one in (compiled, eager):
            with one.session(2) as session:
                session.prompt(tokens[:, :21], [21, 5])
                found.append([*singles(session, tokens[:, 21:31]), session.stats["kv_bytes"]])
        for a, b in zip(*found, strict=True):  # a number between two codes may go to either
            off = np.abs(np.subtract(a, b))
            assert np.median(off) < 1e-4 and off.max() < 0.02
        with eager.session(1) as session:
            session.prompt(tokens[:1, :40])
            held = {n: a for n, a in state(session).items() if n.startswith("low.")}
        width, taken, several = 10, 0, 0
        for key in (2, 4):
            for value in (2, 4):  # the head with the most tokens says how many slots a form has
                codes = -(-width * key // 8) + -(-width * value // 8)
                each = codes + 2 * (2 * 2 + 2 * 3) + 8  # steps, two outliers with their places
                for layer in range(2):
                    slots_ = held[f"low.{layer}.pos.k{key}v{value}"].shape[2]
                    taken, several = taken + 2 * slots_ * each, several + bool(slots_)
        assert sum(a.nbytes for a in held.values()) == taken and several > 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"error": 0.0}, "error is 0.0; give more than 0"),
        ({"least_bits": 3}, "least_bits is 3; give 1, 2, 4 or 8"),
        ({"least_bits": 8}, "least_bits is 8, more than most_bits, 4"),
        ({"outliers": 1.0}, "outliers is 1.0; give at least 0 and less than 1"),
        ({"window": 0}, "window is 0; give 1 to 1024"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(RecipeError, match=f"kv.keep.qaq: {message}"):
        QAQ(**options)
