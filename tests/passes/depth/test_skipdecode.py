"""skipdecode: layers that fall with the position, against transformers' module with those layers."""

import numpy as np
import pytest

import accel
from accel.ir.depth import Depth
from accel.ir.errors import PassError, RecipeError
from accel.passes.depth.skipdecode import Skipdecode, durations

from ...depth_case import far, module_of, oracle

COUNT, LENGTH = 6, 5
TOKENS = np.random.default_rng(8).integers(3, 90, (2, 20))
OPTIONS = {"use": "skipdecode", "min_layers": 3, "length": LENGTH}


def count_at(token, most=COUNT, fewest=3, length=LENGTH):
    """Layers of a token, so many after the first that follows the prompt: a straight line, then level."""
    return int(most - (most - fewest) * min(token / length, 1) + 0.5)


def layers_at(token, most=COUNT, fewest=3, length=LENGTH, warmup=1):
    top = count_at(token, most, fewest, length) - warmup
    return {*range(warmup), *range(most - top, most)}


def ran(prompt, total):
    """Which layers [L,T] each token of a row runs."""
    runs = [set(range(COUNT)) if t < prompt else layers_at(t - prompt) for t in range(total)]
    return np.array([[layer in r for r in runs] for layer in range(COUNT)])


@pytest.fixture(scope="module")
def built():
    with accel.optimize(
        module_of(COUNT),
        {"depth": OPTIONS},
        target="eager",
        max_context=64,
        max_batch=2,
        verify=False,
    ) as compiled:
        yield compiled


def test_each_token_runs_the_layers_of_its_distance_from_its_prompt(built):
    """Of rows whose prompts differ in length: a pad is no token of theirs. The control: another distance."""
    prompts = [6, 9]
    with built.session(2) as session:
        session.prompt(TOKENS[:, :9], prompts)
        for step in range(9):
            at = [p + step for p in prompts]
            got = session.run(TOKENS[[0, 1], at][:, None])
            for row, place in enumerate(at):
                part = TOKENS[row : row + 1, : place + 1]
                want = oracle(module_of(COUNT), part, ran(prompts[row], place + 1))[:, -1:]
                assert far(got[row : row + 1], want) < 1e-4
                if 2 <= step < 4:
                    late = oracle(module_of(COUNT), part, ran(prompts[row] - 2, place + 1))[:, -1:]
                    assert far(got[row : row + 1], late) > 1e-2


def test_the_plans_are_the_straight_line_and_each_lies_within_the_one_before():
    def falls(depth):
        plans = [depth.plan_at(n) for n in range(40)]
        return all(
            all(a or not b for a, b in zip(x, y, strict=True))
            for x, y in zip(plans, plans[1:], strict=False)
        )

    for most, fewest, warmup, length in [
        (6, 3, 1, 5),
        (30, 12, 2, 17),
        (9, 9, 1, 4),
        (8, 2, 1, 1),
        (5, 4, 3, 30),
    ]:
        until = durations(most, fewest, warmup, length)
        plan = tuple(i in layers_at(length, most, fewest, length, warmup) for i in range(most))
        depth = Depth(plan, "nested", until=until)
        for token in range(40):
            found = {i for i, run in enumerate(depth.plan_at(token)) if run}
            assert found == layers_at(token, most, fewest, length, warmup)
        assert falls(depth)
    assert not falls(_Rises((True, False, True), "nested"))  # the control


class _Rises(Depth):
    def plan_at(self, token):
        return (True, token > 3, True)


def test_by_itself_it_is_the_model_that_is_given_these_plans(built):
    """Over the same cache of the prompt; after a rewind again, and in a fork."""
    with built.session() as session, built.session() as other:
        for each in (session, other):
            each.prompt(TOKENS[:1, :7])
        found = []
        for step in range(8):
            token = TOKENS[:1, 7 + step : 8 + step]
            found.append(session.run(token))
            plan = np.isin(np.arange(COUNT), list(layers_at(step)))
            assert np.array_equal(other.run(token, run_layers=plan), found[-1])
        session.rewind(10)
        fork = session.fork()
        for step in range(3, 8):
            token = TOKENS[:1, 7 + step : 8 + step]
            assert np.array_equal(session.run(token), found[step])
            assert np.array_equal(fork.run(token), found[step])
        fork.close()


def test_a_saved_session_goes_on_where_its_plans_are(built, tmp_path):
    with built.session() as session:
        session.prompt(TOKENS[:1, :7])
        for place in range(7, 10):
            session.run(TOKENS[:1, place : place + 1])
        session.save(tmp_path / "saved.kv")
        want = [session.run(TOKENS[:1, place : place + 1]) for place in range(10, 14)]
    with built.open_session(tmp_path / "saved.kv") as session:
        got = [session.run(TOKENS[:1, place : place + 1]) for place in range(10, 14)]
    assert np.array_equal(got, want)


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", ["nested", "propagate"])
def test_rows_at_other_distances_run_the_layers_of_both(cache, built):
    """But for those that one of them lacks, where caches are nested."""
    with (
        accel.optimize(
            *(module_of(COUNT), {"depth": {**OPTIONS, "cache": cache}}),
            target="eager",
            max_context=64,
            max_batch=2,
            verify=False,
        ) as compiled,
        compiled.session(2) as session,
    ):
        session.prompt(TOKENS[:, :6])
        for place in range(6, 9):  # row 0 goes ahead
            session.run(TOKENS[:, place : place + 1], [1, 0])
        got = session.run(np.stack([TOKENS[0, 9:10], TOKENS[1, 6:7]]))
        both = {i for i in layers_at(0) if cache == "propagate" or i in layers_at(2)}
        assert both != layers_at(3)
        for row, place, before in ((0, 9, ran(6, 9)), (1, 6, ran(6, 6))):
            mask = np.concatenate([before, np.isin(np.arange(COUNT), list(both))[:, None]], 1)
            want = oracle(module_of(COUNT), TOKENS[row : row + 1, : place + 1], mask)[:, -1:]
            assert far(got[row : row + 1], want) < 1e-4


@pytest.mark.long
def test_with_all_layers_always_it_is_the_plain_model():
    same = {**OPTIONS, "min_layers": COUNT}
    with accel.optimize(
        module_of(COUNT), {"depth": same}, target="eager", max_context=64, verify=False
    ) as compiled:
        assert compiled.facts.depth.all_run and not compiled.facts.depth.turns
        with compiled.session() as session:
            session.prompt(TOKENS[:1, :4])
            got = np.concatenate([session.run(TOKENS[:1, i : i + 1]) for i in range(4, 12)], 1)
        assert (
            far(got, oracle(module_of(COUNT), TOKENS[:1, :12], np.ones((COUNT, 12), bool))[:, 4:])
            < 1e-4
        )


@pytest.mark.long
def test_layers_that_no_token_runs_are_deleted():
    """Those above the warm-up, in the prompt too."""
    fewer = {**OPTIONS, "max_layers": 4}
    with accel.optimize(module_of(COUNT), {"depth": fewer}, max_context=64) as compiled:
        assert compiled.facts.num_layers == 4
        with compiled.session() as session:
            session.prompt(TOKENS[:1, :7])
            got = [session.run(TOKENS[:1, i : i + 1]) for i in range(7, 14)]
    mask = np.zeros((COUNT, 14), bool)
    for token in range(14):
        at = set(range(4)) if token < 7 else layers_at(token - 7, most=4)
        mask[[i if i < 1 else i + 2 for i in at], token] = True
    assert (
        far(np.concatenate(got, 1), oracle(module_of(COUNT), TOKENS[:1, :14], mask)[:, 7:]) < 1e-4
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"min_layers": 1},
            "min_layers is 1, but 1 of warmup and the last layer always run; give at least 2",
        ),
        ({"warmup": 3, "min_layers": 3}, "give at least 4, or 0"),
        (
            {"max_layers": 3, "min_layers": 4},
            "max_layers is 3; give at least min_layers and more than warmup, 4",
        ),
        ({"max_layers": 1}, "give at least min_layers and more than warmup, 2"),
        ({"warmup": 0}, "warmup is 0; give at least 1"),
        ({"length": 0}, "length is 0; give 1 to"),
        ({"cache": "hole"}, "cache 'hole' does not exist"),
    ],
)
def test_schedules_without_layers_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        Skipdecode(**options)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"max_layers": 7}, {"min_layers": 7}, {"warmup": 3}])
def test_a_schedule_of_more_layers_than_there_are_is_refused(options):
    with pytest.raises(PassError, match="skipdecode: of 6 layers"):
        accel.optimize(
            module_of(COUNT),
            {"depth": {"use": "skipdecode", **options}},
            target="eager",
            max_context=64,
            verify=False,
        )
