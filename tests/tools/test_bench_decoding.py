"""tools/bench/bench_decoding.py: its figures, its log, its settings and its tasks."""

import json
from types import SimpleNamespace

import bench_decoding
import decoding_tasks
import numpy as np
import pytest
from bench_decoding import (
    SWEEPS,
    Setting,
    agreement,
    answers,
    rank_correlation,
    read,
    settings,
    wilson,
    write,
)
from decoding_tasks import LISTS, SHORT, SHOTS, Exactly, Items, Task

from accel.compiler.assemble import assemble
from accel.ir.recipe import Recipe
from accel.runtime.decode.sampling_params import SamplingParams

OF = {"model": "m", "tasks": "short/1"}


@pytest.mark.parametrize("right", [0, 3, 16])
def test_the_interval_holds_the_shares_that_the_count_is_likely_of(right):
    """Its ends are the shares whose distance from what was found is 1.96 of their own deviations."""
    of, found = 16, right / 16
    for end in wilson(right, of):
        deviation = (end * (1 - end) / of) ** 0.5
        assert end in (0, 1) or abs(found - end) == pytest.approx(1.96 * deviation)


def test_ranks_that_are_equal_share_their_mean():
    a, b = np.array([1.0, 2, 2, 9]), np.array([5.0, 1, 1, 0])
    x, y = np.array([1, 2.5, 2.5, 4]), np.array([4, 2.5, 2.5, 1])
    assert rank_correlation(a, b) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert rank_correlation(a, np.ones(4)) == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_likelihood_that_orders_settings_as_answers_do_agrees(sign):
    lines = [
        {"right": [1] * n + [0] * (8 - n), "logs": [sign * float(n)] * 8, "tokens": [2] * 8}
        for n in range(9)
    ]
    rho, low, high = agreement(lines, 50)
    assert rho == pytest.approx(sign) and -1 <= low <= high <= 1 and low * sign > 0.5


def test_a_log_that_was_cut_goes_on(tmp_path):
    log = tmp_path / "log.jsonl"
    assert read(log, OF) == {}
    write(log, {**OF, "setting": "greedy", "right": [True]})
    write(log, {**OF, "tasks": "short/2", "setting": "greedy", "right": [False]})
    with log.open("a", encoding="utf-8") as file:
        file.write('{"model": "m", "tas')
    write(log, {**OF, "setting": "greedy", "speed": [1.0]})
    assert read(log, OF) == {"greedy": {**OF, "setting": "greedy", "right": [True], "speed": [1.0]}}
    assert len(log.read_text(encoding="utf-8").splitlines()) == 4


def test_each_setting_is_a_recipe_and_a_request():
    chosen = settings(False)
    assert len({one.name for one in chosen}) == len(chosen)
    assert len(settings(True)) == len(SWEEPS)
    for one in chosen:
        assemble(Recipe.load({"loop": one.loop} if one.loop else "base"))
        SamplingParams(**one.request)


@pytest.mark.parametrize("kinds", [SHORT, LISTS])
def test_tasks_are_solved_by_their_answers_alone(kinds):
    found = decoding_tasks.drawn(kinds, 4)
    assert [task.kind for task in found] == [*kinds] * 4
    assert found == decoding_tasks.drawn(kinds, 4) != decoding_tasks.drawn(kinds, 4, seed=1)
    for task in found:
        answer = task.right.answer
        assert task.right(f" {answer}.\n") and not task.right(f"The answer is {answer}.")
        assert len(task.prompt) == 2 * SHOTS + 1 and task.prompt[-1]["role"] == "user"
        if task.kind != "add":
            assert all(item in task.prompt[-1]["content"] for item in answer.split(", "))


def test_a_list_has_each_item_once_in_any_order():
    right = Items("Oslo, Lima")
    assert right("Lima, Oslo.")
    assert not any(
        right(text) for text in ("Oslo", "Oslo, Lima, Rome", "Oslo, Lima, Lima", "lima, Oslo")
    )


def test_answers_are_told_in_the_order_of_the_tasks(monkeypatch):
    monkeypatch.setattr(bench_decoding, "ROWS", 2)
    tasks = [Task("", "x" * n, Exactly(str(n))) for n in (3, 1, 2)]
    plain = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [0] * len(text)))

    def generate(prompts, most, logprobs):
        scores = [[{5: SimpleNamespace(logprob=-len(p))}] * 2 for p in prompts]
        texts = [str(min(2, len(p))) for p in prompts]
        return SimpleNamespace(text=texts, tokens=[[5, 5] for _ in prompts], logprobs=scores)

    found = answers(SimpleNamespace(generate=generate), plain, Setting("x"), tasks, lambda n: None)
    assert json.loads(json.dumps(found)) == {
        "right": [False, True, True], "logs": [-6, -2, -4], "tokens": [2, 2, 2],
    }  # fmt: skip
