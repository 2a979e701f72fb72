"""KVCrush: against representatives by hand; no representatives are the base."""

import pytest
import torch

from accel.ir.errors import RecipeError
from accel.ir.ops.noise import uniform

from ....kv_slots import AXES, B, G, build, choose, named, sets, slots
from ....laws.test_kv_refine import refined

ANCHORS = ["zeros", "ones", "alternate", "random", "mean"]


def crushed(mass, where, kept, share, anchor):
    """Positions that each head of a row keeps: mass and positions [G,S]."""
    few = int(kept * share)
    places = [[int(p) for p in head] for head in where]
    worth = [
        {p: float(mass[h, s]) for s, p in enumerate(places[h]) if p >= 0} for h in range(len(where))
    ]
    ranked = [sorted(w, key=lambda p, w=w: -w[p]) for w in worth]
    upper = [set(r[: (len(r) + 1) // 2]) for r in ranked]
    found = []
    for h in range(len(where)):
        best = ranked[h][: kept - few]
        goes = sorted(set(worth[h]) - set(best))
        bits = {}
        for p in goes:
            s = places[h].index(p)
            bits[p] = {g: p in upper[g] for g in range(len(where)) if places[g][s] == p}
        own = {
            "zeros": [False] * G, "ones": [True] * G, "alternate": [g % 2 == 1 for g in range(G)],
            "random": [bool(uniform(0, torch.tensor(g)) < 0.5) for g in range(G)],
            "mean": [
                sum(p in upper[g] for p in _goes(worth[g], ranked[g], kept - few)) * 2
                > len(_goes(worth[g], ranked[g], kept - few))
                for g in range(G)
            ],
        }[anchor]  # fmt: skip
        goes.sort(key=lambda p: sum(bit != own[g] for g, bit in bits[p].items()))
        picks = [p for i, p in enumerate(goes) if i * few % len(goes) < few] if goes else []
        found.append(set(best) | set(picks))
    return found


def _goes(worth, ranked, count):
    return set(worth) - set(ranked[:count])


@pytest.mark.parametrize("anchor", ANCHORS)
def test_representatives_are_spread_over_the_distances(anchor):
    method = build("refine", "kvcrush", share=0.5, anchor=anchor)
    changed = 0
    for seed in range(3):
        x, score = slots(seed), build("score", "h2o", recent=0)
        given = named(x)
        found, plain = sets(choose(x, 8, score, refine=method)), sets(choose(x, 8, score))
        for row in range(B):
            want = crushed(given["mass"][row], given["positions"][row], 8, 0.5, anchor)
            assert found[row] == want
            changed += found[row] != plain[row]
    assert changed, "the control"


def test_without_representatives_it_is_the_base():
    for seed, base in enumerate(("snapkv", "knorm", "h2o", "keydiff")):
        x, score = slots(seed), build("score", base)
        none, all_ = (
            sets(choose(x, 6, score, refine=build("refine", "kvcrush", share=share)))
            for share in (0.0, 1.0)
        )
        assert none == sets(choose(x, 6, score)) != all_


def test_heads_may_change_places():
    """With an anchor that is the same for all heads."""
    for anchor in ("zeros", "ones"):
        method, x = build("refine", "kvcrush", anchor=anchor), slots(2, base=(0, 0, 0))
        given = refined(method, x, build("score", "h2o"))
        turned = {n: v.flip(1) for n, v in given.items()}
        assert torch.equal(method(**turned), method(**given).flip(1))


def test_the_other_anchor_turns_the_order_of_distances():
    zeros, ones = (build("refine", "kvcrush", anchor=anchor) for anchor in ("zeros", "ones"))
    where = torch.arange(12).expand(2, G, 12)
    bits = torch.rand(2, G, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    far = [method._distances(bits, where >= 0, where) for method in (zeros, ones)]
    assert torch.equal(far[0], G - far[1]) and len(far[0].unique()) > 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"share": 1.5}, "share is 1.5; give 0 to 1"),
        ({"anchor": "one"}, r"anchor 'one' does not exist; did you mean 'ones'\?"),
        ({"seed": -1}, "seed is -1; give at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        AXES["refine"].build("kvcrush", **options)
