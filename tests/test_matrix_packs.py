"""Packs of a matrix' cases: every case is settled, by a recipe that holds it, and one that is wrong spoils no other."""

import itertools

import pytest
from matrix import Case, Matrix, Outcome
from packs import MOST, Packs, packed

AXES = ("kv.score", "kv.select", "kv.codec", "prefill.prune", "prefill.sparse", "weights")
CASES = [
    Case("llama", (left, right))
    for one, other in itertools.combinations(sorted(AXES), 2)
    for left in ((one, "a"), (one, "b"))
    for right in ((other, "a"), (other, "b"))
]
APART = {("kv.score", "a"), ("kv.select", "b")}  # which a build refuses
WRONG = {("kv.codec", "b"), ("prefill.sparse", "a")}


class World:
    """A matrix of made-up methods."""

    def __init__(self):
        self.runs = []

    def run(self, case):
        self.runs.append(case)
        if APART <= set(case.tables):
            return Outcome(case, "refused", "apart")
        return Outcome(case, "wrong" if WRONG <= set(case.tables) else "equal")

    def refusal(self, case):
        return Outcome(case, "refused", "apart") if APART <= set(case.tables) else None

    def settled(self, cases=CASES, strict=lambda tables: 0):
        packs = Packs(Case, lambda case: True, strict)
        packs.add(cases)
        found = packed(
            packs, self.run, self.refusal, lambda c, p: Outcome(c, "equal", within=str(p))
        )
        return {outcome.case: outcome for outcome in found}


def test_each_case_is_settled_as_it_would_be_alone():
    world = World()
    found = world.settled()
    assert {c: o.kind for c, o in found.items()} == {c: world.run(c).kind for c in CASES}
    assert sum(o.kind == "wrong" for o in found.values()) == 1


def test_packs_take_fewer_runs():
    world = World()
    world.settled()
    assert len(world.runs) < len(CASES) / 2
    assert max(len(case.tables) for case in world.runs) == min(MOST, len(AXES))


def test_triples_settle_their_pairs():
    world = World()
    triple = Case("llama", tuple((axis, "b") for axis in ("kv.codec", "kv.score", "weights")))
    pairs = [Case("llama", two) for two in itertools.combinations(triple.tables, 2)]
    assert set(world.settled([triple, *pairs])) == {triple, *pairs}
    assert world.runs == [triple]


def test_a_looser_comparison_settles_no_stricter_case():
    """Rounded weights allow more of the logits."""
    world = World()
    found = world.settled(strict=Matrix().strict)
    for outcome in found.values():
        if outcome.within:
            assert ("weights=" in outcome.within) == ("weights" in dict(outcome.case.tables))


def test_what_runs_between_calls_is_of_one_case():
    loop, draft = ("loop", "pearl"), ("draft", "model")
    cases = [Case("llama", (host, ("kv.codec", "a"))) for host in (loop, draft)]
    world = World()
    assert set(world.settled(cases)) == set(cases)
    assert world.runs == cases


@pytest.mark.parametrize("kind", ["refused", "wrong"])
def test_three_that_do_not_go_together_end(kind):
    """Where no two of them say why: cases run alone then."""
    world = World()
    world.run = lambda case: Outcome(case, "equal" if len(case.tables) < 3 else kind)
    world.refusal = lambda case: None
    found = world.settled()
    assert set(found) == set(CASES)
    assert {o.kind for o in found.values()} == {"equal"}
