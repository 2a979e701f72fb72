"""ccd: what agrees with the call before stays beside the surest token."""

from dataclasses import replace

import numpy as np
import pytest

from accel.runtime.loop._canvas import Guess, Place
from accel.runtime.loop.ccd import Ccd

from ...diffusion_case import BLOCK, Case, decoded, eager, guess_of, law, prompts


def mixed(seen, depth, most):
    """The masks of a block, those first that were among the surest of each of the last calls, by the entropy of their
    mean probabilities; the others by their own.
    """
    calls = seen.memory["calls"]
    calls.append({i: law(seen.logits)[i] for i in seen.order[:most]})
    del calls[:-depth]
    sure = [i for i in seen.order if len(calls) == depth and all(i in one for one in calls)]
    mean = {i: sum(one[i] for one in calls) / depth for i in sure}
    mean = {i: -sum(x * np.log(x) for x in p if x > 0) for i, p in mean.items()}
    return sorted(sure, key=mean.get) + [i for i in seen.order if i not in sure]


def coherent(warm, expand, adaptive, depth):
    """One token a step, and with it those that were next to be filled a step before and whose token is the same."""

    def stays(seen):
        memory, token = seen.memory, seen.logits.argmax(1)
        if seen.step == 0:
            memory.clear()
            memory.update(size=1, buffer=[], before=None, calls=[])
        if seen.step >= warm - 1:
            memory["size"] = min(memory["size"] + 1, 1 + int(expand))
        if seen.free.sum() <= 0.1 * len(seen.slots):
            memory["size"] = 1
        order = mixed(seen, depth, 2 + int(expand))
        chosen = order[:1]
        if seen.step >= warm and order[0] in memory["buffer"]:
            same = [
                i for i in order[: memory["size"]]
                if i in memory["buffer"] and token[i] == memory["before"][i]
            ]  # fmt: skip
            if same:
                chosen = same if adaptive else same[:1]
        memory["buffer"] = [i for i in order if i not in chosen][: memory["size"]]
        memory["before"] = token
        return chosen

    return stays


CASES = [
    Case({"warm": 2, "expand": 4.0, "depth": 1}, coherent(2, 4, True, 1)),
    Case({"warm": 2, "expand": 4.0, "depth": 3}, coherent(2, 4, True, 3)),
    Case({"warm": 3, "expand": 2.0, "adaptive": False}, coherent(3, 2, False, 2)),
]


def said(loop, memory, step, entropy, tokens, slots=None, total=10):
    n = len(entropy)
    guess = replace(
        guess_of(np.full(n, 0.5)), entropy=np.array(entropy), tokens=np.array(tokens),
        slots=np.arange(n) if slots is None else np.array(slots),
    )  # fmt: skip
    place = Place(step, total, np.ones(total, bool), 0, 0, total, memory, np.random.default_rng(0))
    return guess.slots[loop.stays(guess, place)].tolist()


def test_slots_that_were_next_and_have_not_changed_stay_together():
    loop, memory = Ccd(warm=1, expand=4.0, depth=1), {}
    assert said(loop, memory, 0, [1, 2, 3, 4, 5], [7, 7, 7, 7, 7]) == [0]
    left = [1, 2, 3, 4]
    assert said(loop, memory, 1, [2, 3, 4, 5], [7, 7, 7, 7], left) == [1, 2]
    assert said(loop, memory, 2, [1, 2], [7, 7], [3, 4]) == [3, 4]


def test_few_masks_are_looked_at_one_by_one():
    loop, memory = Ccd(warm=1, expand=4.0, depth=1), {}
    said(loop, memory, 0, [1, 2, 3], [7] * 3, total=20)
    assert said(loop, memory, 1, [2, 3], [7] * 2, [1, 2], total=20) == [1]
    assert said(loop, memory | {"next": {1, 2}, "size": 1}, 2, [2, 3], [7] * 2, [1, 2]) == [1, 2]


def test_what_changed_or_was_not_next_waits():
    for tokens, entropy, want in (
        ([7, 9, 7, 7], [2, 3, 4, 5], [1]),  # the second slot's token changed
        ([7, 7, 7, 7], [5, 4, 3, 2], [4]),  # the surest was not among the next
    ):
        loop, memory = Ccd(warm=1, expand=4.0, depth=1), {}
        said(loop, memory, 0, [1, 2, 3, 4, 5], [7] * 5)
        assert said(loop, memory, 1, entropy, tokens, [1, 2, 3, 4]) == want


def test_a_fixed_budget_keeps_as_many_as_before():
    loop, memory = Ccd(warm=1, adaptive=False, depth=1), {}
    said(loop, memory, 0, [1, 2, 3, 4, 5], [7] * 5)
    assert said(loop, memory, 1, [2, 3, 4, 5], [7] * 4, [1, 2, 3, 4]) == [1]


def test_fewer_calls_than_one_token_each_and_no_more():
    _, compiled = eager(False)
    fixed = decoded(compiled, "ccd", prompts(), block=BLOCK, warm=1, adaptive=False)[1]
    assert fixed == [21, 21]
    assert max(decoded(compiled, "ccd", prompts(), block=21, warm=1)[1]) < 21


# The mean of the last calls


def calls(seed, count, slots=9, tokens=12):
    """What some calls say of the same slots, [count] of a guess."""
    rng = np.random.default_rng(seed)
    return [
        Guess.of(np.arange(slots), logits.argmax(1), logits)
        for logits in rng.standard_normal((count, slots, tokens)) * 3
    ]


def kept(loop, guesses, steps=0):
    """What stays of the last of these calls, of a block of 9 masks."""
    memory = loop.begin(None)
    for step, guess in enumerate(guesses):
        place = Place(step, 9, np.ones(9, bool), 0, 0, 9, memory, np.random.default_rng(0))
        found = loop.stays(guess, place).tolist()
    return found


FIXED = {"adaptive": False, "steps": 3, "block": 9, "expand": 9.0}


def law_mean(kind):
    """The masks whose mean has the least entropy stay, three by three: of one call, or of calls that are all alike,
    those of the least entropy itself. None is less than the mean of the entropies.
    """
    for seed in range(5):
        guesses = calls(seed, 3)
        plain = np.argsort(guesses[-1].entropy, kind="stable")[:3].tolist()
        assert kept(kind(depth=1, **FIXED), guesses) == plain
        assert kept(kind(depth=3, **FIXED), [guesses[-1]] * 3) == plain
        laws = np.stack([guess.probabilities for guess in guesses])
        p = laws.mean(0)
        of_mean = -(p * np.log(p)).sum(1)
        assert (of_mean >= np.mean([guess.entropy for guess in guesses], axis=0) - 1e-9).all()
        assert (
            kept(kind(depth=3, **FIXED), guesses) == np.argsort(of_mean, kind="stable")[:3].tolist()
        )


class Forgets(Ccd):
    """Goes by the last call alone, however deep."""

    def _order(self, guess, memory, most):
        return np.argsort(guess.entropy, kind="stable").tolist()


class Averages(Ccd):
    """Takes the mean of the entropies for the entropy of the mean."""

    def _order(self, guess, memory, most):
        memory["laws"].append(guess.entropy)
        return np.argsort(np.mean(memory["laws"][-self.depth :], axis=0), kind="stable").tolist()


def test_masks_stay_by_the_entropy_of_their_mean():
    law_mean(Ccd)


@pytest.mark.parametrize("wrong", [Forgets, Averages])
def test_another_mean_is_seen(wrong):
    with pytest.raises(AssertionError):
        law_mean(wrong)


def test_masks_that_were_not_among_the_surest_come_behind():
    first, second = calls(0, 2)
    loop = Ccd(depth=2, adaptive=False, expand=0.0)  # two are remembered of each call
    both = set(first.entropy.argsort()[:2]) & set(second.entropy.argsort()[:2])
    want = next(iter(both)) if both else second.entropy.argmin()
    assert kept(loop, [first, second]) == [want]


def filled(loop, guesses):
    """How many stay of each call, of which what stayed before is no part."""
    memory, left, counts = loop.begin(None), np.arange(9), []
    for step, guess in enumerate(guesses):
        some = Guess.of(left, guess.tokens[left], guess.logits[left])
        place = Place(step, 9, np.ones(9, bool), 0, 0, 9, memory, np.random.default_rng(0))
        found = loop.stays(some, place)
        left = np.delete(left, found)
        counts.append(len(found))
    return counts


def test_no_fewer_stay_than_are_due():
    """Two of each call; more where what is said does not change, unless the number is fixed."""
    more = 0
    for seed in range(5):
        for said in (calls(seed, 3), [calls(seed, 1)[0]] * 3):
            given = {"warm": 1, "steps": 4, "block": 9}
            assert filled(Ccd(adaptive=False, **given), said) == [3, 2, 2]
            counts = filled(Ccd(**given), said)
            assert all(n >= least for n, least in zip(counts, [3, 2, 2], strict=True))
            more += sum(counts) > 7
    assert 0 < more
