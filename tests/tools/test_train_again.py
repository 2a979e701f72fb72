"""tools/train/again.py: every bundled part tells how it was made, and only a whole one takes its place."""

import shutil

import again
import numpy as np
import part
import pytest
import typer
from safetensors.numpy import load_file, save_file

from accel.compiler.train.options import TrainOptions
from accel.ir.parts import parts

PARTS = again.bundled()


def test_every_method_with_a_bundled_part_is_there():
    files = {path.stem for path in again.REFERENCE.glob("*.safetensors")} - {"model"}
    assert files == set(PARTS) and files == set(parts())


@pytest.mark.parametrize("method", PARTS)
def test_the_command_has_the_options_that_the_file_tells(method):
    line = again.command(method, PARTS[method])
    assert line[:2] == ["python", "tools/train/part.py"]
    named, given = part.arguments(line[2:])
    options = TrainOptions.of(named, given)
    told = {n: v for n, v in PARTS[method].items() if n in again.OPTIONS}
    assert len(told) > 2
    assert all(float(getattr(options, n)) == float(value) for n, value in told.items())
    assert all(given[n] == getattr(options, n) for n in told), "the command names them"


def test_a_part_takes_the_place_of_the_old_one_when_it_is_whole(tmp_path, monkeypatch):
    reference = tmp_path / "reference"
    reference.mkdir()
    old, about = {"0.x": np.zeros(1, np.float32)}, {"method": "leank", "told": '{"seed": "5"}'}
    save_file(old, reference / "leank.safetensors", about)
    shutil.copy(reference / "leank.safetensors", tmp_path / "new")
    monkeypatch.setattr(again, "REFERENCE", reference)
    monkeypatch.setattr(again, "folder", lambda name: tmp_path / name)
    monkeypatch.setattr(again, "PART", tmp_path / "part.py")
    again.PART.write_text("raise SystemExit('no memory')")
    with pytest.raises(typer.Exit):
        again.main(["leank"])
    assert load_file(reference / "leank.safetensors")["0.x"] == 0
    assert "no memory" in (tmp_path / "parts" / "leank.log").read_text()
    again.PART.write_text(
        "import sys, numpy as np\nfrom safetensors.numpy import save_file\n"
        "assert sys.argv[1:4] + sys.argv[6:] == ['leank', '--threads', '1', '--seed', '5'], sys.argv\n"
        "about = {'method': 'leank', 'told': '{}'}\n"
        "save_file({'0.x': np.ones(1, np.float32)}, sys.argv[5], about)\n"
    )
    again.main(["leank"])
    assert load_file(reference / "leank.safetensors")["0.x"] == 1
    again.PART.write_text("raise SystemExit('it is there')")
    again.main(["leank"])
    with pytest.raises(typer.BadParameter, match="no part of 'x'; there are leank"):
        again.main(["x"])


@pytest.mark.long  # it reads the standard library
def test_the_bundled_model_learns_from_what_it_was_trained_on(tmp_path, capsys):
    out = tmp_path / "q-filter.safetensors"
    part.main(["q-filter", "--out", str(out), "--length", "32", "--samples", "2"])
    assert "2 rows of 32 tokens" in capsys.readouterr().out
    filters = load_file(out)
    assert all(np.isfinite(t).all() and abs(t).max() > 0 for t in filters.values())
    with pytest.raises(SystemExit, match="part: rate is 0.0; give more than 0"):
        part.main(["trim-kv", "--out", str(out), "--rate", "0"])
