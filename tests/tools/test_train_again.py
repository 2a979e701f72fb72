"""tools/train/again.py: every bundled part tells how it was made, and only a whole one takes its place."""

import shutil

import again
import numpy as np
import pytest
import train
import typer
from safetensors.numpy import load_file, save_file

PARTS = again.bundled()


def test_every_method_with_a_bundled_part_is_there():
    files = {path.stem for path in again.REFERENCE.glob("*.safetensors")} - {"model"}
    assert files == set(PARTS) and files <= set(train.trained_methods())


@pytest.mark.parametrize("method", PARTS)
def test_the_command_has_the_options_that_the_file_tells(method, monkeypatch):
    script, line = "tools/train/train.py", again.command(method, PARTS[method])
    assert line[:2] == ["python", script]
    monkeypatch.setattr("sys.argv", line[1:])
    options = vars(train.arguments())
    told = {n: v for n, v in PARTS[method].items() if n in again.OPTIONS}
    assert len(told) > 3
    assert all(float(options[name]) == float(value) for name, value in told.items())


def test_a_part_takes_the_place_of_the_old_one_when_it_is_whole(tmp_path, monkeypatch):
    reference = tmp_path / "reference"
    reference.mkdir()
    old, about = {"0.x": np.zeros(1, np.float32)}, {"method": "leank", "told": '{"seed": "5"}'}
    save_file(old, reference / "leank.safetensors", about)
    shutil.copy(reference / "leank.safetensors", tmp_path / "new")
    monkeypatch.setattr(again, "REFERENCE", reference)
    monkeypatch.setattr(again, "folder", lambda name: tmp_path / name)
    monkeypatch.setattr(again, "TRAIN", tmp_path / "train.py")
    again.TRAIN.write_text("raise SystemExit('no memory')")
    with pytest.raises(typer.Exit):
        again.main(["leank"])
    assert load_file(reference / "leank.safetensors")["0.x"] == 0
    assert "no memory" in (tmp_path / "parts" / "leank.log").read_text()
    again.TRAIN.write_text(
        "import sys, numpy as np\nfrom safetensors.numpy import save_file\n"
        "assert sys.argv[1:4] + sys.argv[6:] == ['leank', '--threads', '1', '--seed', '5'], sys.argv\n"
        "about = {'method': 'leank', 'told': '{}'}\n"
        "save_file({'0.x': np.ones(1, np.float32)}, sys.argv[5], about)\n"
    )
    again.main(["leank"])
    assert load_file(reference / "leank.safetensors")["0.x"] == 1
    again.TRAIN.write_text("raise SystemExit('it is there')")
    again.main(["leank"])
    with pytest.raises(typer.BadParameter, match="no part of 'x'; there are leank"):
        again.main(["x"])
