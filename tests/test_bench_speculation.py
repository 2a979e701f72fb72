"""bench --speculation: kinds of prompts, figures that add up, and what cannot be measured."""

import json
from pathlib import Path

import bench_speculation_page as page
import pytest
from typer.testing import CliRunner

import accel.reference
from accel import cli
from accel.commands import speculation
from accel.ir.errors import InputError
from accel.reference.kinds import KINDS, prompts

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
    assert any(r["tokens_per_check"] > 1.2 for r in result["rows"]), "a copy is looked up"
    page.write(tmp_path, [{"name": "prompt-lookup", **result}])
    text = (tmp_path / "speculation.md").read_text()
    assert (
        "| `prompt-lookup` |" in text and len(list((tmp_path / "speculation").glob("*.png"))) == 3
    )


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


def test_an_artifact_without_drafts_is_refused(build):
    with pytest.raises(InputError, match="loop = autoregressive, which does not draft"):
        speculation.measure(build("llama").compiled.artifact.path, count=1, tokens=8, repeat=1)
    found = CliRunner().invoke(cli.app, ["bench", "somewhere", "--speculation", "--context", "4"])
    assert found.exit_code != 0 and "--context is for random prompts" in found.output
