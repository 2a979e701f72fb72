"""mikv: what the score does not choose goes on in few bits, and nothing else changes."""

from functools import cache

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import RecipeError
from accel.passes.kv._shared import low
from accel.passes.kv.keep.mikv import MiKV

from ....kv_case import FOREVER, LENGTHS, evicting, kept, ragged_is_alone, recipe, state
from ....kv_slots import D, G, build, choose, real, sets, slots
from ....laws.test_kv_keep import no_others
from ....session_ways import close, oracle, singles


def chosen(x, keep, count=5):
    return choose(x, count, build("score", "knorm"), keep=keep)


def law_nothing_is_lost(keep, seed=0):
    """Each token is in one of the tiers; those that were chosen as without this; the others near, in their places;
    and what was demoted before stays as it is, to the bit.
    """
    x = slots(seed) | no_others(keep)
    first, dropped = chosen(x, keep), chosen(x, build("keep", "drop"))
    for part in ("k", "v", "pos"):
        assert torch.equal(first[part], dropped[part])
    high, others = sets(first), sets({"pos": first["low.pos"]})
    for row, heads in enumerate(real(x)):
        for head, tokens in enumerate(heads):
            assert high[row][head] | others[row][head] == tokens
            assert not high[row][head] & others[row][head]
    held = {"k": ("kept_k", "recent_k"), "v": ("kept_v", "recent_v")}
    where = torch.cat((x["kept_pos"], x["recent_pos"][:, None].expand(-1, G, -1)), dim=2)
    where = where.masked_fill(where >= x["seen"][:, None, None], -1)
    for role, names in held.items():
        own = torch.cat([x[n] for n in names], dim=2)
        parts = {p: first[f"low.{role}.{p}".rstrip(".")] for p in keep.parts(D)}
        back = keep.decode(parts, D)
        for b, g, slot in (first["low.pos"] >= 0).nonzero().tolist():
            want = own[b, g][where[b, g] == first["low.pos"][b, g, slot]][0]
            halves = want.reshape(2, -1)
            step = (halves.amax(1) - halves.amin(1)) / (2**keep.bits - 1)
            assert (
                (back[b, g, slot] - want).reshape(2, -1).abs() <= step[:, None] * 0.52 + 2e-3
            ).all()
    names = [n for n in first if n.startswith("low.")]
    again = chosen(
        x | {f"kept_{n}": first[n] for n in names} | {"kept_pos": x["kept_pos"] - 10**6}, keep
    )
    for b, g, slot in (first["low.pos"] >= 0).nonzero().tolist():
        place = (again["low.pos"][b, g] == first["low.pos"][b, g, slot]).nonzero()[0, 0]
        for name in names:
            assert torch.equal(first[name][b, g, slot], again[name][b, g, place])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nothing_is_lost(bits):
    for seed in range(3):
        law_nothing_is_lost(MiKV(bits=bits), seed)


@pytest.mark.parametrize("broken", ["order", "tier"])
def test_a_token_that_is_lost_is_caught(monkeypatch, broken):
    whole = low.demoted

    def other(*operands):
        found = whole(*operands)
        name = "low.pos" if broken == "tier" else "low.k"
        return found | {name: found[name].roll(1, dims=2)}

    monkeypatch.setattr(low, "demoted", other)
    with pytest.raises(AssertionError):
        law_nothing_is_lost(MiKV(bits=4))


# Sessions


@pytest.fixture(scope="module")
def cases(stateful):
    """cases(keep, score) -> a small Llama that keeps 12 tokens as they are."""

    @cache
    def get(keep="mikv", score="knorm"):
        tables = recipe(score, keep="drop")
        tables["kv.keep"] = {"use": "mikv", "bits": 8} if keep == "mikv" else {"use": keep}
        return evicting(stateful("llama"), tables)

    return get


@pytest.mark.few(1)
@pytest.mark.parametrize("score", ["knorm", "h2o"])
def test_each_row_is_as_it_is_alone(cases, score):
    ragged_is_alone(cases(score=score), tolerance=2e-3)


def test_the_answer_is_near_that_of_the_whole_cache(cases):
    """In 8 bits; of what eviction drops it is far."""
    off = {}
    tokens = cases().tokens(1, 60)
    for keep in ("mikv", "drop"):
        whole, ours = cases(keep).session(budget=FOREVER), cases(keep).session()
        for one in (whole, ours):
            one.run(tokens[:, :40])
            one.end_prompt()
        off[keep] = np.abs(singles(whole, tokens[:, 40:44]) - singles(ours, tokens[:, 40:44])).max()
        assert kept(ours)[0].shape[2] == 12
    assert off["mikv"] < 0.1 < 3 * off["mikv"] < off["drop"]


def test_where_everything_stays_no_bit_changes(cases):
    tokens = cases().tokens(3, 60)
    plain, wide = cases("drop").session(3, budget=FOREVER), cases().session(3, budget=FOREVER)
    for one in (plain, wide):
        one.run(tokens[:, :40], LENGTHS)
        one.end_prompt()
    assert np.array_equal(plain.run(tokens[:, 40:45]), wide.run(tokens[:, 40:45]))


def test_rewinds_and_forks_leave_what_was_demoted(cases):
    tokens = cases().tokens(1, 60)
    ours = cases().session()
    ours.run(tokens[:, :40])
    ours.end_prompt()
    before = state(ours)["low.0.pos"].copy()
    assert (before >= 0).sum(axis=2).tolist() == [[28, 28]]
    other = ours.fork()
    want = other.run(tokens[:, 40:44])
    ours.run(tokens[:, 50:54])
    ours.rewind(40)
    close(ours.run(tokens[:, 40:44]), want)
    other.rewind(0)
    assert (state(other)["low.0.pos"] == -1).all() and np.array_equal(
        state(ours)["low.0.pos"], before
    )
    fresh = cases().session()
    close(other.run(tokens[:, :9]), fresh.run(tokens[:, :9]))


def test_memory_is_its_formula(cases):
    """Codes, and two steps and smallest numbers of float16 a token and head, and where it stands."""
    ours = cases().session()
    ours.run(cases().tokens(1, 40))
    ours.end_prompt()
    width = 10
    taken = sum(a.nbytes for n, a in state(ours).items() if n.startswith("low."))
    assert taken == 2 * 2 * 28 * (2 * (width + 2 * 2 * 2) + 8)  # layers, heads, tokens


@pytest.mark.long
def test_graphs_give_what_the_oracle_does():
    model = models.make("llama", 2)
    tables = {"kv": {"score": {"use": "knorm"}, "keep": {"use": "mikv", "bits": 2}}}
    tables["kv"]["budget"] = {"use": "uniform", "tokens_kept": 8}
    tokens = np.random.default_rng(0).permutation(50)[None, :46].repeat(2, 0)
    with accel.optimize(model, tables, max_context=128, max_batch=2) as compiled:
        eager = oracle(compiled)
        found = []
        for one in (compiled, eager):
            with one.session(2) as session:
                session.run(tokens[:, :21], [21, 5])
                session.end_prompt()
                logits = [session.run(tokens[:, 21:35])]
                session.end_prompt()
                found.append([*logits, session.run(tokens[:, 35:39]), session.stats["kv_bytes"]])
        for a, b in zip(*found, strict=True):  # a number between two codes may go to either
            off = np.abs(np.subtract(a, b))
            assert np.median(off) < 1e-4 and off.max() < 0.02


def test_bits_that_cannot_be_are_refused():
    with pytest.raises(RecipeError, match="kv.keep.mikv: bits is 3"):
        MiKV(bits=3)
