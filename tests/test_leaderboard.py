"""The leaderboard's tool: every recipe has a case, questions cover every depth, a page comes of its results."""

import json
from collections import Counter

import leaderboard
import leaderboard_measure as measure
import leaderboard_page as page
import pytest


def test_every_recipe_of_causal_models_has_cases_and_base_is_first():
    assert {"base", "snapkv", "prompt-lookup"} <= set(
        leaderboard.suited()
    ) and "prophet" not in leaderboard.suited()
    found = leaderboard.cases()
    assert found[0].name == "base" and len({c.name for c in found}) == len(found)
    assert {c.recipe for c in found} == set(leaderboard.suited())
    first = {c.recipe for c in found[: len(leaderboard.suited())]}
    assert first == set(leaderboard.suited()), "each recipe once, before any at another value"


def test_a_sweep_sets_the_option():
    rows = [c for c in leaderboard.cases() if c.recipe == "snapkv"]
    assert {c.tables["kv.budget"]["tokens_kept"] for c in rows} == {c.value for c in rows}
    assert len(rows) == 4 and all(c.tables["kv.score"] == {"use": "snapkv"} for c in rows)


@pytest.mark.long
def test_a_sweep_is_what_counts():
    rows = {r: [c.tables for c in leaderboard.cases() if c.recipe == r] for r in ("mikv", "quest")}
    assert [t["kv.budget"] for t in rows["mikv"]] == [
        {"use": "uniform", "tokens_kept": n} for n in (256, 128, 512, 64)
    ]
    assert [t["kv.select"]["tokens_read"] for t in rows["quest"]] == [256, 128, 512, 64]


def test_questions_are_as_many_of_every_kind():
    asked = list(measure.questions(1))
    counts = Counter((task, length, depth) for task, length, depth, *_ in asked)
    assert len(counts) == len(measure.TASKS) * len(measure.LENGTHS) * measure.DEPTHS
    assert set(counts.values()) == {1}
    for _, _, depth, text, answer in asked:
        assert depth == int(measure.DEPTHS * text.find(answer) / len(text))


def result(name, share, kl, **more):
    recipe, _, value = name.partition("@")
    speed = {"tokens_per_second": 100.0, "ratio": share, "least": share / 2, "most": share * 2}
    cells = [
        f"{t} {n} {d}"
        for t in measure.TASKS
        for n in measure.LENGTHS
        for d in range(measure.DEPTHS)
    ]
    return {
        "name": name, "recipe": recipe, "option": "tokens_kept" if value else "", "family": "kv",
        "value": float(value) if value else None,
        "samples": {"windows": 1, "prompts": 2, "rounds": 3}, "kv_bytes": int(1e7 * share), "peak_memory": 10**8,
        "quality": {"perplexity": 50.0, "kl": kl, "agreement": 1 - kl, "tokens": 9},
        "recall": {c: [1, 2] if c.endswith("0") else [2, 2] for c in cells},
        "speed": {"prefill": speed, "decode": speed}, **more,
    }  # fmt: skip


@pytest.mark.long
def test_the_page(tmp_path):
    rows = [result("base", 1, 0), result("some@128", 0.25, 0.3), result("some@512", 0.5, 0.1)]
    kinds = {"copy": 1.9, "code": 1.2, "free": 1.4}
    loop = {"speedup": 1.5, "kinds": kinds, "tokens_per_check": 2.5, "equal": 6, "texts": 6}
    rows += [result("guesses", 1, 0, loop=loop), result("plain", 1, 0, loop=None)]
    page.write(
        tmp_path,
        [*rows, {"name": "odd", "refused": "no cache of keys"}],
        {"some@128", "guesses", "plain"},
    )
    text = (tmp_path / "leaderboard.md").read_text()
    assert "| some@128 | kv | 50.00 | 0.3000 | 70.0% | 88 | 88 | 2.50 | 0.25 |" in text
    assert "| some@512 |" not in text, "one row for each recipe"
    assert "| recipe | option | 64 | 128 | 256 | 512 |" in text
    assert "| some | `tokens_kept` | – | 0.3000, 88 | – | 0.1000, 88 |" in text
    assert "- `odd`: no cache of keys" in text
    assert "| guesses | 1.50 | 1.20 (code) | 1.90 (copy) | 2.50 | 6 of 6 |" in text
    for picture in ("budget", "recall", "speed"):
        assert (tmp_path / "leaderboard" / f"{picture}.png").stat().st_size > 5000
    assert page.share(rows[0], 500, 0) == 0.5 and page.share(rows[0], 500, 1) == 1


def test_a_result_is_whole_or_not_there(tmp_path):
    leaderboard.keep(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        leaderboard.keep(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}


def test_parts_of_a_case_are_measured_apart(tmp_path):
    case, both = leaderboard.Case("some", "kept", 5), list(measure.PARTS)
    assert leaderboard.missing(case, {}, both) == both
    there = {"some@5": {"name": "some@5", "quality": {}, "recall": {}}}
    assert leaderboard.missing(case, there, both) == ["speed", "loop"]
    assert leaderboard.missing(case, {"some@5": {"refused": "no"}}, both) == []
    rows = [result("base", 1, 0), result("some@128", 0.25, 0.3)]
    del rows[1]["speed"], rows[1]["peak_memory"]
    page.write(tmp_path, rows, {"base", "some@128"})
    assert "| 0.25 | – | – | – |" in (tmp_path / "leaderboard.md").read_text()


def test_parts_of_this_machine_come_before_those_of_the_page(tmp_path, monkeypatch):
    page_, own = tmp_path / "results.jsonl", tmp_path / "own"
    monkeypatch.setattr(leaderboard, "weights", lambda: "w")
    assert leaderboard.results_of(own, page_) == {}
    before = [{"name": "a", "x": 1, "y": 1}, {"name": "b", "x": 1}, {"name": "c", "refused": "no"}]
    lines = [json.dumps({**one, "weights": "w"}) for one in before]
    other = json.dumps({"name": "d", "x": 1, "weights": "of an earlier release"})
    page_.write_text("\n".join([*lines, other, ""]))
    leaderboard.keep(own / "a.json", {"name": "a", "x": 2})
    leaderboard.keep(own / "c.json", {"name": "c", "x": 3})
    found = leaderboard.results_of(own, page_)
    assert found == {
        "a": {"name": "a", "x": 2, "y": 1, "weights": "w"},
        "b": {"name": "b", "x": 1, "weights": "w"},
        "c": {"name": "c", "x": 3, "weights": "w"},
    }
