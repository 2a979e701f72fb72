"""When a loop drafts, and how far: what rounds gave against what calls and drafters cost."""

import numpy as np
import pytest

from accel.runtime.decode.costs import Costs
from accel.runtime.speculation import guard as _guard
from accel.runtime.speculation.guard import LONGEST, TRIAL, Guard


def test_a_guard_goes_by_tokens_and_costs():
    """Every second draft stands, the others fall: where a token costs as much in a call, none pays."""
    first = {}
    for each, rests in ((1.0, True), (0.1, False)):
        guard = Guard(Costs((1, 32), (1.0, 1 + 31 * each)), 1)
        first[each] = guard.limit
        for i in range(TRIAL):
            limit = guard.limit
            guard.observe(1 + i % 2 * limit, [(limit, i % 2 * limit)], again=0)
        assert (guard.limit == 0) == rests
    assert first[1.0] < first[0.1], "cheap tokens are drafted further"
    cheap = Guard(Costs((1, 32), (1.0, 1.0)), 1)
    for fell, limit in ((0, 31), (31, 31)):
        cheap.observe(1, [(31, 31 - fell)], 0)
        assert cheap.limit == limit, "all that costs nothing is drafted"
    for _ in range(3):
        guard.observe(5, [(1, 0)], 0)
    assert 1 <= guard.limit < first[0.1], "less where less stands"


def test_a_call_of_more_tokens_than_were_measured_costs_in_proportion():
    costs, limits = Costs((1, 32), (1.0, 4.0)), []
    for tokens in (7.0, 9.0):  # a call of 64 tokens costs 8 steps
        guard = Guard(costs, 1)
        for _ in range(TRIAL):
            guard.observe(tokens, [(63, 62)], 0)
        limits.append(guard.limit)
    assert limits[0] == 0 < limits[1]


def test_what_has_to_run_again_is_paid_for():
    for again, rests in ((0, False), (3, True)):
        guard = Guard(Costs((1, 32), (1.0, 1.0)), 1)
        for _ in range(TRIAL):
            guard.observe(1.5, [(3, 1)], again)
        assert (guard.limit == 0) == rests


def test_a_call_that_runs_tokens_again_costs_what_a_call_of_them_does():
    guard = Guard(Costs((1, 2, 32), (1.0, 3.0, 3.0)), 1)
    for _ in range(TRIAL):
        guard.observe(4.5, [(1, 1)], again=1)  # 3 steps, and one more
    assert guard.limit > 0


def test_calls_of_more_rows_have_a_limit_of_their_own():
    costs = Costs((1, 32), (1.0, 4.1))
    guard, other = Guard(costs, 1), Guard(costs, 8)
    assert guard.limit > other.limit
    guard.of_batch(8)
    assert guard.limit == other.limit


def test_a_trial_that_loses_much_ends_at_once():
    guard = Guard(Costs((1, 32), (1.0, 32.0)), 1)
    guard.observe(1, [(31, 0)], 0)
    assert guard.limit == 0


def test_rests_grow_to_the_longest():
    guard, rests = Guard(Costs((1, 32), (1.0, 1.1)), 1), []
    for _ in range(7):
        while guard.limit:
            guard.observe(1, [(1, 0)], 0)
        rests.append(0)
        while not guard.limit:
            guard.rest()
            rests[-1] += 1
    assert rests == [16, 32, 64, 128, 256, 256, 256] and LONGEST == 256


def trials(efforts, stands, steps, told=0.0):
    """Tokens per plain step's time, where a call of several costs as much as one, a drafted token `efforts`, and
    each that follows what stands does so with a chance of `stands`.
    """
    guard, time, given, rng = (
        Guard(Costs((1, 32), (1.0, 1.0)), 1, told),
        0.0,
        0,
        np.random.default_rng(0),
    )
    while given < steps:
        if limit := min(10, guard.limit):
            stood = min(limit, int(rng.geometric(1 - stands)) - 1)
            time += 1 + efforts * limit
            given += 1 + stood
            guard.observe(1 + stood, [(limit, stood)], 0, efforts * limit)
        else:
            time, given = time + 1, given + 1
            guard.rest()
    return given / time


@pytest.mark.parametrize("steps", [200, 600])
@pytest.mark.parametrize("told", [0.5, 1.0])
def test_a_drafter_that_does_not_pay_costs_little(steps, told):
    for efforts in (0.3, 1.0, 3.0):
        assert trials(efforts, 0.1, steps, told * efforts) > 0.95
    assert trials(0.3, 0.9, steps) > 1.3, "one that pays is not given up"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "_draft_cost", 0.0)
        assert trials(1.0, 0.1, steps) < 0.9, "one whose time is not counted"


def test_a_drafter_that_costs_too_much_is_not_even_tried():
    costs = Costs((1, 32), (1.0, 1.0))
    assert Guard(costs, 1, 2.0).limit == 0 < Guard(costs, 1, 0.2).limit < Guard(costs, 1).limit


def looked(stands, steps, hears=True, beside=0.0, reading=8):
    """As `trials`, where a call of several tokens costs more than one, a drafted one 0.3, and the drafter can look
    back: it says whether it would have drafted each of the last 16 tokens, for 2 plain steps; before its first draft
    it reads a prompt, for 8. `beside`: plain steps that each round takes and nobody foresees.
    """
    costs = Costs((1, 2, 32), (1.0, 1.2, 4.0))
    guard, time, given = Guard(costs, 1, 0.3, probes=True), 0.0, 0
    rng = np.random.default_rng(0)
    while given < steps:
        if guard.due:
            right = (rng.random(16) < stands).tolist()
            guard.probe([(1, int(r)) for r in right] if hears else [], 2.0)
            time += 2
        if limit := min(10, guard.limit):
            stood = min(limit, int(rng.geometric(1 - stands)) - 1)
            spent = costs.ratio(1 + limit) + 0.3 * limit + beside
            guard.observe(
                1 + stood, [(limit, stood)], 0, 0.3 * limit / costs.ratio(1 + limit), spent
            )
            time, given, reading = time + spent + reading, given + 1 + stood, 0
        else:
            time, given = time + 1, given + 1
            guard.rest(1.0)
    return given / time


def test_a_drafter_that_looks_back_is_not_tried_in_vain():
    assert looked(0.0, 96) > 0.95 > looked(0.0, 96, hears=False), "one that is not listened to"
    assert looked(0.95, 400) > 1.5, "one that pays is heard"


def test_what_a_round_takes_beside_is_found_out(monkeypatch):
    """A draft that pays by what its calls cost, and does not by the clock."""
    assert looked(0.9, 600) > 1.3
    assert looked(0.8, 600, beside=2.0) > 0.9
    monkeypatch.setattr(_guard, "BESIDE", 0.0)
    assert looked(0.8, 600, beside=2.0) < 0.8, "who does not look at the clock goes on"


def test_rows_of_a_batch_cost_what_as_many_tokens_do():
    costs = Costs((1, 8, 32), (1.0, 1.0, 4.0))
    assert Guard(costs, 1)._costs[7] == 1 and Guard(costs, 4)._costs[7] == 4
    assert Guard(costs, 8)._costs[7] == pytest.approx(8), "beyond what was measured, in proportion"


def test_a_call_without_padding_costs_what_its_tokens_do():
    """Two of eight rows draft: a padded call computes as much for the others, and does not pay."""
    costs, limits = Costs((1, 32), (1.0, 4.0)), []
    for computed in (None, 8 * 11, 2 * 11 + 6):
        guard = Guard(costs, 8)
        for _ in range(TRIAL):
            guard.observe((2 * 11 + 6) / 8, [(10, 10)] * 2, 0, computed=computed)
        limits.append(guard.limit)
    assert limits[0] == limits[1] == 0 < limits[2]


FLAT, STEEP = Costs((1, 32), (1.0, 1.1)), Costs((1, 32), (1.0, 40.0))


def test_where_no_draft_pays_nothing_is_looked_at():
    for given in ({"probes": True}, {"watches": True}, {"shaped": True}, {}):
        guards = [Guard(costs, 1, **given) for costs in (FLAT, STEEP)]
        for guard in guards:
            for _ in range(8):
                guard.rest(1.0)
        cheap, dear = guards
        assert cheap.due or cheap.watching or cheap.limit
        assert not (dear.due or dear.watching or dear.limit)


def test_drafts_are_made_once_what_would_have_been_says_so():
    for stood, pays in ((3, True), (0, False)):
        guard = Guard(Costs((1, 32), (1.0, 8.0)), 1, watches=True)
        assert guard.limit == 0 and guard.watching
        guard.watch([(3, stood, 3)], 0.0)
        guard.watch([(3, stood, 3)], 0.0)
        assert (guard.limit > 0) == pays
    guard = Guard(Costs((1, 2, 32), (1.0, 1.6, 9.0)), 1, watches=True)
    for stood in (0, 1, 0, 1):  # every second, for six tenths of a step
        guard.watch([(1, stood, 1)], 0.0)
    assert guard.limit == 0


def test_looking_that_takes_long_ends():
    """A fifth of a step each time is more than may be lost for long; a hundredth is not."""
    looks = []
    for each in (0.2, 0.01):
        guard, count = Guard(FLAT, 1, watches=True), 0
        for _ in range(96):
            if guard.watching:
                guard.watch([(1, 0, 1)], each)
                count += 1
            guard.rest(1.0)
        looks.append(count * each)
    assert looks[0] < 4.8 and looks[1] == pytest.approx(0.96)


def test_a_tree_pays_by_what_all_of_it_costs():
    for nodes, pays in ((4, True), (30, False)):
        guard = Guard(Costs((1, 32), (1.0, 8.0)), 1, shaped=True, watches=True)
        guard._won = _guard.KEPT
        for _ in range(4):
            guard.watch([(3, 2, nodes)], 0.0)
        assert (guard.limit > 0) == pays


def test_what_a_first_draft_takes_is_waited_for():
    guard, steps = Guard(FLAT, 1, opening=2.0), 0
    while not guard.limit:
        guard.rest(1.0)
        steps += 1
    assert 22 < steps < 32, "half a step more than it may lose, at two hundredths a step"
    probing = Guard(FLAT, 1, probes=True, opening=2.0)
    for _ in range(_guard.FIRST):
        probing.rest(1.0)
    assert not probing.due and probing.limit == 0
    cheap = Guard(FLAT, 1, probes=True, opening=1.0)
    for _ in range(_guard.FIRST):
        cheap.rest(1.0)
    assert cheap.due


def test_a_round_of_one_size_is_run_where_it_can_pay_and_be_lost():
    guard = Guard(Costs((1, 32), (1.0, 7.2)), 1)
    assert guard.affords(5, 4) and not guard.affords(5, 1), "it gives less than it costs"
    assert not guard.affords(20, 20), "it could lose four steps"
    for _ in range(4):
        guard.observe(5, [(4, 4)], 0)
    assert guard.affords(20, 20), "after as much was won"


def test_a_loss_ends_rounds_at_once():
    """No round begins that could lose more than is left."""
    guard, lost = Guard(Costs((1, 32), (1.0, 13.4)), 1), 0.0
    for _ in range(96):
        if limit := guard.limit:
            lost += guard.cost(limit) - 1
            guard.observe(1, [(limit, 0)], 0)
        else:
            guard.rest(1.0)
    assert 0 < lost < 0.05 * 96


def test_a_probe_right_after_rows_joined_goes_by_the_costs():
    """No plain step of that many rows has run yet."""
    guard = Guard(FLAT, 1, probes=True)
    for _ in range(_guard.FIRST):
        guard.rest(2.0)
    assert guard.due
    guard.of_batch(2)
    step = guard.step
    guard.probe([(1, 1)], 0.1)
    assert guard.step == step and not guard.due
