"""tools/bench/human_eval.py: what counts as solved, and what the tests' process may not do."""

import os
from types import SimpleNamespace

import human_eval
import pytest
from human_eval import ROWS, Problem, answered, passes

HEAD = 'def twice(x):\n    """Return two times x."""\n'
TEST = "def check(candidate):\n    assert candidate(3) == 6\n"
PROBLEM = Problem(HEAD, TEST, "twice")


@pytest.mark.parametrize(
    ("body", "solved"),
    [
        ("    return 2 * x", True),
        ("    return x + 4", False),
        ("    return 2 *", False),
        ("    return twice(x)", False),
        ("", False),
    ],
)
def test_a_body_is_solved_where_the_tests_pass(body, solved):
    assert passes(PROBLEM.program(body), []) is solved


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "act",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytes(3 << 30)",
        "open('big', 'wb').write(bytes(2 << 20))",
    ],
)
def test_bounds_end_a_program(act, monkeypatch):
    monkeypatch.setattr(human_eval, "SECONDS", 1)
    monkeypatch.setenv("SECRET", "x")
    assert not passes(act, [])


def test_a_program_runs_in_a_folder_of_its_own_without_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    program = f"import os; assert 'SECRET' not in os.environ and os.getcwd() != {os.getcwd()!r}"
    assert passes(program, []) and not passes(program.replace("not in", "in"), [])


def test_answers_come_back_in_the_order_of_the_problems():
    """They are asked by length, in groups of ROWS."""
    asked = [Problem("#" * (50 - i) + "\n" + HEAD, TEST, "twice") for i in range(ROWS + 3)]
    groups = []

    def generate(prompts, new, stop):
        groups.append(len(prompts))
        right = [len(p.splitlines()[0]) % 2 for p in prompts]
        return SimpleNamespace(text=[f"    return {1 + r} * x" for r in right])

    found = answered(SimpleNamespace(generate=generate), asked, [], lambda n: None)
    assert groups == [ROWS, 3]
    assert found == [(50 - i) % 2 == 1 for i in range(ROWS + 3)]
