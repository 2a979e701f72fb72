"""bench --speculation: kinds of prompts, figures that add up, and what cannot be measured."""

import json
from pathlib import Path
from types import SimpleNamespace

import bench_speculation as bench
import bench_speculation_page as page
import pytest
from results import folder
from typer.testing import CliRunner

import accel.reference
from accel import cli
from accel.commands import speculation
from accel.ir.errors import InputError
from accel.ir.recipe import Recipe
from accel.reference.kinds import KINDS, QUESTIONS, prompts, questions

MODEL = Path(next(iter(accel.reference.__path__)))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """An artifact of the bundled model that looks its prompt up."""
    folder = tmp_path_factory.mktemp("drafting") / "artifact"
    accel.optimize(MODEL, "prompt-lookup", out=folder, verify=False, max_context=512).close()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_kind_are_the_same_again_and_differ_by_seed(kind):
    found = prompts(kind, 4)
    assert found == prompts(kind, 4) and found != prompts(kind, 4, seed=1)
    assert all(200 < len(p) < 4000 for p in found)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_of_a_kind_are_as_many_and_ask(kind):
    found = questions(kind, 4)
    assert found == questions(kind, 4) and found != questions(kind, 4, seed=1)
    assert all(100 < len(q) < 4000 and q[0].isupper() for q in found)
    assert QUESTIONS.keys() == KINDS.keys()


def test_a_model_with_a_chat_template_is_asked():
    class Words:
        config = SimpleNamespace(templates={"default": "…"})

        def encode(self, text):
            return ["text", text]

        def apply_chat_template(self, messages):
            return ["chat", messages[0]["content"]]

    words = Words()
    model = SimpleNamespace(tokenizer=words)
    assert speculation._ids(model, "edit", 2) == [["chat", q] for q in questions("edit", 2)]
    words.config = SimpleNamespace(templates={})
    assert speculation._ids(model, "edit", 2) == [["text", p] for p in prompts("edit", 2)]


def test_a_recipe_is_given_the_draft_model_that_it_needs(tmp_path):
    other, draft = tmp_path / "one.gguf", tmp_path / "two.gguf"
    assert bench.given_to("draft-model", other, None) is None
    given = bench.given_to("draft-model", other, draft)
    assert given.tables["draft"] == {"use": "model", "path": str(draft)}
    assert bench.given_to("prompt-lookup", other, None) == Recipe.load("prompt-lookup")
    assert bench.given_to("draft-model", bench.MODEL, None) == Recipe.load("draft-model")


def test_results_of_a_model_are_those_of_its_files(tmp_path):
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    alone = folder("speculation", one)
    assert alone == folder("speculation", one) != folder("speculation", one, other)
    one.write_bytes(b"12")
    assert folder("speculation", one) != alone


@pytest.mark.long
def test_every_kind_is_measured(drafting, tmp_path):
    words = [
        "bench",
        str(drafting),
        "--speculation",
        "--prompts",
        "1",
        "--tokens",
        "24",
        "--repeat",
        "1",
    ]
    found = CliRunner().invoke(cli.app, [*words, "--json"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert [r["kind"] for r in result["rows"]] == list(KINDS)
    for r in result["rows"]:
        assert r["equal"] == 1 and r["speedup"] > 0 and 1 <= r["tokens_per_check"] <= 24
        assert sum(r["shares"].values()) == pytest.approx(1)
        assert r["milliseconds"]["verify"] > 0
    assert any(r["tokens_per_check"] > 1.2 for r in result["rows"]), "a copy is looked up"
    page.write(tmp_path, [{"name": "prompt-lookup", **result}], ["prompt-lookup"])
    text = (tmp_path / "speculation.md").read_text()
    assert "### One prompt at a time, greedy" in text and "Not measured" not in text


def test_the_page_takes_partial_results(tmp_path):
    """Two recipes of three, one of them only in batches; a table of what there is, and the names of what is missing."""
    runs = [
        {"ratios": [1.5], "plain": 10.0, "drafting": 15.0, "whole": 15.0, "equal": 1, "tokens": 12, "rows": 1,
         "speculation": {"drafted": 8, "accepted": 5, "fallback": 1, "by_place": [[4, 3]], "seconds": {"verify": 1.0}}},
    ]  # fmt: skip
    rows = [{"kind": kind, **speculation._together(runs)} for kind in KINDS]
    common = {"prompts": 1, "new_tokens": 12, "repeat": 1, "rows": rows, "draft_bytes": 1234}
    names = ["one", "other", "third"]
    results = [
        {"name": "one", "batch": 8, "temperature": 0.8, **common},
        {"name": "other", "batch": 1, "temperature": 0.0, **common},
        {"name": "other", "batch": 8, "temperature": 0.8, **common},
        {"name": "gone", "batch": 1, "temperature": 0.0, **common},
    ]
    page.write(tmp_path, results, names)
    text = (tmp_path / "speculation.md").read_text()
    one, batched = (
        text.index("### One prompt at a time, greedy"),
        text.index("### 8 prompts at a time, temperature 0.8"),
    )
    assert one < text.index("| `other` |") < text.index("Not measured: `one`, `third`.") < batched
    assert batched < text.index("| `one` |") < text.index("Not measured: `third`.")
    assert "`gone`" not in text, "a recipe that is no more"
    costs = "| `other` | 1.50 | 1.83 | 62% | 0.00 | 166.67 | 0.00 | 100.00 | 1,234 | 6/6 |"
    assert text.count(costs) == 1, "a plain step of one row; of eight it takes eight times as long"
    assert "\n".join(page.ratios(results[1:2])).count(costs) == 1
    assert len(list((tmp_path / "speculation").glob("*.png"))) == 3
    with pytest.raises(ValueError, match="there is no result of a recipe"):
        page.write(tmp_path, results[3:], names)


def test_what_is_kept_is_not_measured_again(tmp_path, monkeypatch):
    """But with other settings it is; a case that fails leaves nothing, and the others go on."""
    asked = []

    def measured(case, **options):
        asked.append((case.name, case.batch, case.temperature))
        assert case.name != "bad", "a failure"
        return {
            "name": case.name,
            "prompts": case.batch,
            "new_tokens": options["tokens"],
            "repeat": options["repeat"],
        }

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "_measured", measured)
    words = ["--prompts", "1", "--tokens", "4", "--repeat", "1", "--only", "bad", "--only", "good"]
    found = CliRunner().invoke(bench.app, words)
    assert (
        found.exit_code == 1 and "FAILED Case(name='bad', batch=8, temperature=0.8)" in found.output
    )
    assert asked[:2] == [("bad", 1, 0.0), ("good", 1, 0.0)] and len(asked) == 8
    assert len(list(tmp_path.iterdir())) == 4 == len(list(tmp_path.glob("good.*.json")))
    CliRunner().invoke(bench.app, words)
    assert [name for name, *_ in asked[8:]] == 4 * ["bad"]
    CliRunner().invoke(bench.app, [*words, "--tokens", "5", "--batch", "8"])
    assert asked[12:] == [(name, 8, t) for t in (0.0, 0.8) for name in ("bad", "good")]


def test_what_stands_is_added_up():
    runs = [
        {"ratios": [1.0, 2.0], "plain": 10.0, "drafting": 15.0, "whole": 15.0, "equal": 1, "tokens": 12, "rows": 2,
         "speculation": {"drafted": 8, "accepted": 5, "fallback": 1, "by_place": [[4, 3], [3, 2]],
                         "seconds": {"draft": 1.0, "verify": 2.0, "host": 1.0}}},
        {"ratios": [4.0, 4.0], "plain": 10.0, "drafting": 40.0, "whole": 40.0, "equal": 0, "tokens": 11, "rows": 1,
         "speculation": {"drafted": 2, "accepted": 0, "fallback": 0, "by_place": [[2, 0]], "seconds": {"verify": 4.0}}},
    ]  # fmt: skip
    found = speculation._together(runs)
    assert found["speedup"] == 3.0 and found["slowest"] == 1.5 and found["equal"] == 1
    assert found["tokens_per_check"] == 20 / 15 and found["accepted"] == 0.5
    assert found["by_place"] == [0.5, 2 / 3] and found["shares"] == {
        "draft": 0.125,
        "verify": 0.75,
        "host": 0.125,
    }
    assert speculation._together(runs[1:])["milliseconds"] == {"verify": 1000 * 4.0 / 10}
    two = speculation._together(runs[:1])["milliseconds"]
    assert two == {"draft": 1000 * 2 / 5, "verify": 2000 * 2 / 5, "host": 1000 * 2 / 5}, (
        "of calls of two rows"
    )


def test_an_artifact_without_drafts_is_refused(build):
    with pytest.raises(InputError, match="loop = autoregressive, which does not draft"):
        speculation.measure(build("llama").compiled.artifact.path, count=1, tokens=8, repeat=1)
    found = CliRunner().invoke(cli.app, ["bench", "somewhere", "--speculation", "--context", "4"])
    assert found.exit_code != 0 and "--context is for random prompts" in found.output
