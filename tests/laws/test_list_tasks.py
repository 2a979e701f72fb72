"""Loops that fill masks, on lists whose joint distribution is known: what is drawn in one call is drawn apart from each
other, and a rule's score is what the closed form says of the tokens that it fills per call.
"""

import math
from itertools import product

import bench_parallel as bench
import numpy as np
import pytest
from bench_parallel import TARGETS, Task, rules, run

ITEMS, ROWS = 5, 160
RULES = rules(ITEMS, 32)
SURE = [name for name, make in TARGETS.items() if make is not None]


def law_expected(found, rows=ROWS):
    """Within five deviations of what is expected, which holds of one way of filling."""
    assert found.expected is not None
    spread = math.sqrt(max(found.expected * (1 - found.expected), 1e-9) / rows)
    assert abs(found.score - found.expected) <= 5 * spread


@pytest.mark.few(5)
@pytest.mark.parametrize("rule", RULES)
def test_a_shuffle_loses_what_the_closed_form_says(rule):
    law_expected(run(Task("shuffle", ITEMS), RULES[rule], ROWS))


@pytest.mark.few(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SURE)
def test_what_is_certain_stays_exact(name, rule):
    found = run(Task(name, ITEMS), RULES[rule], 12)
    assert found.score == found.expected == 1


def test_all_at_once():
    """The control: with every slot in one call a shuffle fails, and a list that is copied does not."""
    at_once = {"use": "dllm-lowconf", "steps": 1}
    found = run(Task("shuffle", ITEMS), at_once, ROWS)
    assert found.counts == [ITEMS] and found.per_call == ITEMS and found.score < 0.2
    law_expected(found)
    assert run(Task("copy", ITEMS), at_once, 12).score == 1


def test_where_what_is_filled_depends_on_what_was_drawn_nothing_is_expected():
    """`ccd` fills more where a draw is that of the call before; one token per call is expected of no draw."""
    found = run(Task("shuffle", 8), RULES["ccd"], ROWS)
    assert found.expected is None and found.score < 1
    assert run(Task("copy", 8), RULES["ccd"], 4).score == 1


def test_an_oracle_that_is_no_joint_is_seen(monkeypatch):
    """The control: marginals that do not look at what is filled lose in every call."""
    own = Task.marginals
    monkeypatch.setattr(Task, "marginals", lambda self, prompt, answer: own(self, prompt, []))
    found = run(Task("shuffle", ITEMS), RULES["dllm-lowconf"], ROWS)
    assert found.counts == [1] * ITEMS
    with pytest.raises(AssertionError):
        law_expected(found)


def test_the_closed_form():
    """By all draws of four slots, and by the total correlation of a uniform order."""
    task = Task("shuffle", 4)
    every = list(product(range(4), repeat=4))
    assert task.expected([4]) == sum(task.right([], one) for one in every) / len(every)
    whole = task.items * math.log(task.items) - math.log(math.factorial(task.items))
    assert task.expected([4]) == pytest.approx(math.exp(-whole))
    assert task.expected([1, 1, 1, 1]) == 1
    assert task.expected([2, 2]) == (4 * 3 / 16) * (2 / 4)


@pytest.mark.parametrize(
    "name, target",
    [("copy", [2, 0, 1]), ("replace", [2, 3, 1]), ("reverse", [1, 0, 2]), ("sort", [0, 1, 2])],
)
def test_what_is_right(name, target):
    task = Task(name, 3)
    assert task.target([2, 0, 1, 0]) == target and task.right([2, 0, 1, 0], target)
    assert not task.right([2, 0, 1, 0], target[1:] + target[:1])
    laws = task.marginals([2, 0, 1, 0], [task.mask] * 3)
    assert np.array_equal(laws.argmax(1), target) and np.array_equal(laws.sum(1), np.ones(3))


def test_a_shuffle_takes_any_order_and_no_item_twice():
    task = Task("shuffle", 3)
    assert task.right([0, 1, 2, 0], [2, 0, 1]) and not task.right([0, 1, 2, 0], [2, 2, 1])


def test_the_tables(capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["bench_parallel.py", "--tasks", "sort", "--items", "2", "--rows", "1"]
    )
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(rules(2, 32))
    assert "| `sort` | dllm-lowconf, steps 1 | 2.00 | 100.0% | 100.0% |" in lines
