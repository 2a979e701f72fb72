"""The table of published configurations: names, sources, and that what is not right is not counted so."""

import json
import sys
from types import SimpleNamespace

import published
import pytest

import accel


@pytest.fixture
def smoked(monkeypatch, tmp_path):
    """Runs the command with a smoke that gives these results; returns its exit status and the page."""

    def run(status, *arguments):
        cells = [
            SimpleNamespace(target=t, status=status, error=2e-6, reason="")
            for t in published.TARGETS
        ]
        found = SimpleNamespace(cells=cells, layers=4, notes=[])
        monkeypatch.setattr(accel, "smoke", lambda given, recipes, targets: found)
        monkeypatch.setattr(published, "RESULTS", tmp_path / "build/published.json")
        monkeypatch.setattr(published, "TABLE", tmp_path / "published.md")
        monkeypatch.setattr(published, "ROOT", tmp_path)
        monkeypatch.setattr(sys, "argv", ["published.py", *map(str, arguments), "--write"])
        return published.main(), (tmp_path / "published.md").read_text(encoding="utf-8")

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "org--Some-1B_config.json"
    path.write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    return path


def test_a_file_and_a_default_say_where_their_values_come_from(smoked, file):
    status, page = smoked("right", file, "qwen3_next", "--source", "a copy")
    assert status == 0 and "2 published models: **2 right, 0 refused**" in page
    assert "| org/Some-1B | qwen3 | right | 4 | 2.0e-06 | a copy |  |" in page
    assert "| Qwen/Qwen3-Next-80B-A3B-Instruct | qwen3_next |" in page
    assert "transformers: defaults of Qwen3NextConfig" in page


def test_a_wrong_one_fails_the_run_and_is_counted(smoked, file):
    status, page = smoked("wrong", file, "--source", "a copy")
    assert status == 1 and "**0 right, 0 refused, 1 wrong**" in page


def test_a_refusal_is_told_without_the_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "kosmos-2"}), encoding="utf-8")
    row = published.measure(path)
    assert row["results"] == dict.fromkeys(published.TARGETS, "refused")
    assert row["why"].startswith("model_type of config.json: 'kosmos-2'")


def test_a_file_needs_a_source(smoked, file):
    with pytest.raises(SystemExit):
        smoked("right", file)
