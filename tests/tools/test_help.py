"""Tools that take no options say what they do when asked, and do not do it."""

import os
import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize("tool", ["pages/structure.py", "train/calibration_text.py"])
@pytest.mark.parametrize("option, end", [("--help", 0), ("--hlep", 2)])
def test_a_tool_without_options_only_answers(tool, option, end, monkeypatch, capsys):
    def refuse(self, *args, **options):
        raise AssertionError(f"{self} is written")

    monkeypatch.setattr(sys, "argv", [tool, option])
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(os.fspath(TOOLS / tool), run_name="__main__")
    assert stopped.value.code == end
    said = capsys.readouterr()
    assert f"python tools/{tool}" in said.out or option in said.err
