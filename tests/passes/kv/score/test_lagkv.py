"""LagKV: against NumPy, partition by partition, and what its page says of scales, queries and counts."""

import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.runtime.kv.budget.threshold import Threshold

from ....kv_case import evicting, held, kept
from ....kv_slots import AXES, B, C, G, build, choose, named, sets, slots

FULL = {"base": (0, 0, 0), "recent": (16, 12, 7)}


def scored(keys, values, sinks, size):
    """Rows [n,D] of one head -> the softmaxes of its partitions but the last, by token."""
    found, n = {}, len(keys)
    count = max(0, (n - sinks) // size)
    for part in range(count - 1):
        first = sinks + part * size
        own, following = slice(first, first + size), slice(first + size, first + 2 * size)
        total = np.zeros(size)
        for x in (keys, values):
            low, high = x[following].min(0), x[following].max(0)
            spread = ((x[own] - low) / (high - low)).std(-1, ddof=1)
            e = np.exp(spread - spread.max())
            total += e / e.sum() / 2
        found |= {first + i: float(s) for i, s in enumerate(total)}
    return found


@pytest.mark.parametrize("across", [False, True])
def test_is_the_rank_in_a_partition(across):
    for seed, (sinks, size) in enumerate(((1, 3), (0, 4), (2, 2), (1, 9))):
        x = slots(seed, **FULL)
        method = build("score", "lagkv", sinks=sinks, partition=size, across=across)
        found = sets(choose(x, 6, method))
        for row, n in enumerate((16, 12, 7)):
            for head in range(2):
                k, v = (x[f"recent_{p}"][row, head, :n].double().numpy() for p in "kv")
                own = scored(k, v, sinks, size)
                worth = {p: (2.0, p) for p in range(n)} | {p: (own[p], p) for p in own}
                if not across:
                    for p in own:
                        first = sinks + (p - sinks) // size * size
                        ranks = sorted(range(first, first + size), key=lambda q: own[q])
                        worth[p] = ranks.index(p) / size, p
                worth |= {p: (3.0, -p) for p in range(min(sinks, n))}
                best = sorted(worth, key=lambda p: worth[p], reverse=True)[:6]
                if across:  # of the tail, any
                    tail = set(worth) - set(own)
                    best = best if len(tail) <= 6 else found[row][head] & tail
                assert found[row][head] == set(best), (row, head, sinks, size)


def test_a_scale_of_channels_changes_nothing():
    """The same positive affine map of all tokens; of one partition alone it does (the control)."""
    method, x = build("score", "lagkv", partition=3), slots(3, **FULL)
    want = sets(choose(x, 8, method))
    scale, shift = torch.linspace(0.3, 4, 6), torch.linspace(-2, 5, 6)
    moved = x | {f"recent_{p}": x[f"recent_{p}"] * scale + shift for p in "kv"}
    assert sets(choose(moved, 8, method)) == want
    some = torch.where(torch.arange(C)[:, None] % 3 == 0, scale, 1.0)
    assert sets(choose(x | {"recent_k": x["recent_k"] * some}, 8, method)) != want


def test_channels_of_one_number_are_numbers():
    x = slots(1, **FULL)
    x["recent_k"] = torch.ones_like(x["recent_k"])
    method = build("score", "lagkv")
    values = named(x)
    assert method(values["keys"], values["values"], values["positions"]).isfinite().all()


def test_short_of_two_partitions_it_is_the_newest():
    found = sets(choose(slots(0, **FULL), 5, build("score", "lagkv", partition=8)))
    for row, n in zip(found, (16, 12, 7), strict=True):
        assert row == [{0, *range(n - 4, n)}] * 2


def evicted(x, ends, score, share):
    """What is left of tokens 0 .. ends[-1] - 1 that came up to each of `ends`, and were cut there."""
    kept, before = {}, 0
    for end in ends:
        now = torch.arange(C)
        now = torch.where((now >= before) & (now < end), now, -1).expand(B, -1)
        found = choose(
            x | {"seen": torch.full((B,), end), "recent_pos": now} | kept,
            1,
            score,
            Threshold(1 - share),
        )
        kept = {f"kept_{name}": value for name, value in found.items() if f"kept_{name}" in x}
        before = end
    return sets(found)


def law_freezes(score, share, kept):
    """Evicting on the way keeps what evicting once does: of each partition with a next one, the best."""
    size = score.partition
    for seed in range(3):
        x = slots(seed, base=(0, 0, 0), recent=(16, 16, 16))
        for end in (9, 14, 16):
            once = evicted(x, [end], score, share)
            for row, head in np.ndindex(B, G):
                k, v = (x[f"recent_{p}"][row, head, :end].double().numpy() for p in "kv")
                own = scored(k, v, score.sinks, size)
                want = set(range(end)) - set(own)
                for first in range(score.sinks, score.sinks + len(own), size):
                    part = range(first, first + size)
                    want |= set(sorted(part, key=own.get)[size - kept :])
                assert once[row][head] == want
            for ends in ([3, 8], [5, 6, 7, 8, 9, 12], [8]):
                assert evicted(x, [*(e for e in ends if e < end), end], score, share) == once


@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "kept"), [(0.34, 1), (0.67, 2), (1.0, 3)])
def test_partitions_that_lost_tokens_are_frozen(share, kept):
    law_freezes(build("score", "lagkv", partition=3, freezes=True), share, kept)


def test_partitions_that_are_counted_anew_are_caught():
    with pytest.raises(AssertionError):
        law_freezes(build("score", "lagkv", partition=3), 0.34, 1)


@pytest.mark.long
def test_a_session_that_evicts_on_the_way_keeps_what_one_does_at_the_end(stateful):
    """In the first layer, whose keys depend on their tokens alone."""
    score = {"use": "lagkv", "sinks": 1, "partition": 3, "freezes": True}
    budget = {"use": "threshold", "threshold": 0.66}
    tables = {"kv.score": score, "kv.budget": budget, "kv.when": {"use": "every", "tokens": 4}}
    case = evicting(stateful("llama"), tables)
    tokens = case.tokens(1, 40)
    with case.session() as session, case.session(when={"use": "prompt"}) as once:
        for end in range(4, 41, 4):
            session.run(tokens[:, end - 4 : end])
        once.prompt(tokens)
        found, want = ({*kept(one)[0][0, 0].tolist()} - {-1} for one in (session, once))
        assert found == want and len(found) == 1 + 12 * 1 + 3
        assert held(session) == held(once) < 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": -1}, "sinks is -1; give at least 0"),
        ({"partition": 1}, "partition is 1; give 2 to"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(RecipeError, match=f"kv.score.lagkv: {words}"):
        AXES["score"].build("lagkv", **options)
