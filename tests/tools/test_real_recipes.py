"""tools/pages/real_recipes.py: what it asks, which results it takes as known, and its page."""

import json

import pytest
import real_recipes
from leaderboard import suited, swept
from needles import key_prompts, number_prompts
from real_recipes import known_already, page
from reference_data import REFERENCE

from accel.ir.errors import InputError

BASE = {
    "name": "base", "case": "base", "model": "m", "date": "2026-11-27", "bytes": 2e6, "perplexity prose": 9.5,
    "perplexity code": 8.25, "keys": 3, "numbers": 3,
}  # fmt: skip
OTHER = {
    **BASE,
    "name": "snapkv",
    "case": "snapkv@256",
    "kl prose": 0.5,
    "kl code": 0.25,
    "keys": 1,
    "texts": 2,
}
REFUSED = {
    "name": "calm",
    "case": "calm@0.9",
    "model": "m",
    "date": "2026-11-28",
    "refused": "PassError: a|b",
}


@pytest.mark.parametrize("made", [key_prompts, number_prompts])
def test_what_is_asked_for_stands_in_the_prompt_and_differs(made):
    asked = made(3)
    assert len(asked) == 3 and len({wanted for _, wanted in asked}) == 3
    assert all(wanted in prompt for prompt, wanted in asked)
    assert made(4)[:3] == asked


def test_the_number_is_of_the_one_who_is_asked_for():
    for prompt, wanted in number_prompts(3):
        name = prompt.rpartition("number of ")[2].rstrip("?")
        assert prompt.count("The phone number of ") == 5
        assert f"The phone number of {name} is {wanted}." in prompt


def test_results_are_known_of_this_model_only(tmp_path):
    kept, results = tmp_path / "kept.jsonl", tmp_path / "results"
    assert known_already(kept, "m", results, train=False) == set()
    results.mkdir()
    kept.write_text(
        "\n".join(json.dumps({"name": n, "model": m}) for n, m in [("a", "m"), ("b", "x")])
    )
    (results / "c.json").write_text(json.dumps({"name": "c", "model": "m"}))
    assert known_already(kept, "m", results, train=False) == {"a", "c"}
    lacks = {"name": "d", "model": "m", "refused": "measure it: accel-compile train d MODEL"}
    (results / "d.json").write_text(json.dumps(lacks))
    assert known_already(kept, "m", results, train=True) == {"a", "c"}
    assert known_already(kept, "m", results, train=False) == {"a", "c", "d"}


def test_page():
    lines = page([BASE, REFUSED, OTHER]).splitlines()
    said = f"3 of {len(suited())} recipes were measured: 2 are built and 1 refused."
    assert any(said in line for line in lines)
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == [
        "| `base` | 2 | – | – | 9.50 | 8.25 | 3 | 3 | – |",
        "| `snapkv@256` | 2 | 0.5000 | 0.2500 | 9.50 | 8.25 | 1 | 3 | 2 |",
        "| `calm@0.9` | PassError: a/b |",
    ]
    head = next(line for line in lines if line.startswith("| recipe | MB"))
    assert head.count("|") == rows[0].count("|")


def test_recipes_are_measured_at_the_leaderboards_first_value():
    assert swept("snapkv")[0].name == "snapkv@256"
    assert real_recipes.swept is swept


def test_a_model_without_a_chat_template_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(InputError, match="has no chat template"):
        real_recipes.measure(REFERENCE, [swept("snapkv")[0]], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_model_is_measured(smollm2, tmp_path):
    real_recipes.measure(smollm2, [swept("streaming-llm")[0]], tmp_path)
    found = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert found.keys() == {"base", "streaming-llm"}
    assert 0 < found["streaming-llm"]["kl prose"] and found["base"]["keys"] == real_recipes.HIDDEN
    assert page(list(found.values()))


def test_options_of_a_case_are_set_as_in_toml():
    case = real_recipes.changed(
        swept("snapkv")[0], ["kv.score.window=16", 'kv.score.pooling="max"']
    )
    assert case.tables["kv.score"] == {"use": "snapkv", "window": 16, "pooling": "max"}
    assert "window" not in swept("snapkv")[0].tables["kv.score"], "the recipe is as it was"
    for wrong in ("kv.score.window", "kv.codec.bits=4", "kv.score.pooling=max"):
        with pytest.raises(InputError, match=f"--set {wrong}: "):
            real_recipes.changed(swept("snapkv")[0], [wrong])


def test_budgets_of_a_case():
    case = swept("snapkv")[0]
    found = real_recipes.sized(case, [100, 50])
    assert [one.name for one in found] == ["snapkv@100", "snapkv@50"]
    assert [one.tables["kv.budget"]["tokens_kept"] for one in found] == [100, 50]
    assert all(one.tables["kv.score"] == case.tables["kv.score"] for one in found)
    assert real_recipes.sized(case, []) == [case]
    assert real_recipes.sized(swept("int4")[0], [100, 50]) == [swept("int4")[0]]


def test_an_option_may_add_an_axis():
    case = swept("sentencekv")[0]
    first = 'prefill.prune.use="gemfilter"'
    found = real_recipes.changed(case, [first, "prefill.prune.tokens=384"]).tables
    assert found["prefill.prune"] == {"use": "gemfilter", "tokens": 384}
    assert found["kv.select"] == case.tables["kv.select"]
    with pytest.raises(InputError, match="give AXIS.OPTION=VALUE of"):
        real_recipes.changed(case, ["prefill.prune.tokens=384", first])
