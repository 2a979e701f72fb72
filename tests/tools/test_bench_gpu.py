"""tools/bench/bench_gpu.py: it keeps what was measured when a part crashes or hangs, and runs to its end."""

import json

import bench_gpu
import gpu_models
import gpu_parts
import pytest
import torch
from typer.testing import CliRunner

START = 15  # seconds that the first part may import, and those of processes that end
FAKE = """
import json, sys, time
name, lines = sys.argv[1:]
float(input())
with open(lines, "a") as file:
    print(json.dumps({"what": name, "value": 1.5, "unit": "ms", "note": ""}), file=file, flush=True)
if name == "correctness":
    raise SystemExit("the device was lost")
if name == "kernels":
    time.sleep(60)
"""


def ran(*arguments):
    app = bench_gpu.typer.Typer()
    app.command()(bench_gpu.main)
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_part_that_crashes_or_hangs_loses_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "gpu_parts.py").write_text(FAKE)
    monkeypatch.setattr(bench_gpu, "HERE", tmp_path)
    monkeypatch.setitem(gpu_parts.PARTS, "kernels", gpu_parts.Part(gpu_parts.kernels, 2.0))
    out = tmp_path / "out.json"
    only = [x for name in ("machine", "correctness", "kernels", "drafts") for x in ("--only", name)]
    said = ran(out, *only)
    parts = json.loads(out.read_text())["parts"]
    assert {name: len(part["figures"]) for name, part in parts.items()} == {
        "machine": 1, "correctness": 1, "kernels": 1, "drafts": 1,
    }  # fmt: skip
    assert parts["machine"]["status"] == parts["drafts"]["status"] == "done"
    assert "the device was lost" in parts["correctness"]["status"]
    assert "were over" in parts["kernels"]["status"] and "| kernels | 1.5 | ms |" in said


def test_the_parts_fit_into_the_time_of_all():
    needed = sum(part.seconds for part in gpu_parts.PARTS.values())
    assert needed <= bench_gpu.SECONDS - START and bench_gpu.SECONDS < 8 * 60
    every = gpu_parts.PARTS | gpu_parts.SPARE
    assert all(2 * part.tuning <= part.seconds for part in every.values())
    assert every["correctness"].tuning == 0
    assert next(iter(gpu_parts.PARTS)) == "correctness"


def test_seconds_shorten_every_part(tmp_path, monkeypatch):
    (tmp_path / "gpu_parts.py").write_text(FAKE)
    monkeypatch.setattr(bench_gpu, "HERE", tmp_path)
    monkeypatch.setitem(gpu_parts.PARTS, "kernels", gpu_parts.Part(gpu_parts.kernels, 60.0))
    ran(tmp_path / "out.json", "--only", "kernels", "--seconds", 15)
    part = json.loads((tmp_path / "out.json").read_text())["parts"]["kernels"]
    assert part["status"] == "its 2 s were over" and len(part["figures"]) == 1


def test_no_part_begins_when_the_time_is_over(tmp_path):
    out = tmp_path / "out.json"
    assert "machine: not measured: no time was left" in ran(out, "--seconds", 1)
    assert {p["status"] for p in json.loads(out.read_text())["parts"].values()} == {
        "not measured: no time was left"
    }


def test_what_fails_says_so_in_the_place_of_its_figure(tmp_path):
    figures = gpu_parts.Figures(tmp_path / "lines", 100.0)
    with figures.trying("a") as time_left:
        assert time_left
        raise ValueError("the\nreason")
    with figures.trying("b", 1000.0) as time_left:
        assert not time_left
    found = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(one["what"], one["value"]) for one in found] == [
        ("a", "not measured"),
        ("b", "not measured"),
    ]
    assert found[0]["note"] == "ValueError: the reason" and "no time" in found[1]["note"]


def test_a_hollow_model_takes_no_memory_and_ties_nothing_else(monkeypatch):
    monkeypatch.setitem(gpu_models.SHAPES, "small", gpu_models.SMALLEST)
    weights = dict(gpu_models.hollow("small").named_parameters())
    assert all(w.untyped_storage().nbytes() == w.element_size() for w in weights.values())
    assert len({w.data_ptr() for w in weights.values()}) == len(weights)
    assert not any(b.is_meta for b in gpu_models.hollow("small").buffers())


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the parts are of their real size")
@pytest.mark.timeout(1900)
def test_it_runs_to_its_end_on_a_tiny_model(tmp_path):
    out = tmp_path / "out.json"
    ran(out, "--tiny")
    parts = json.loads(out.read_text())["parts"]
    assert parts.keys() == (gpu_parts.PARTS | gpu_parts.SPARE).keys()
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "done")
    missing = [
        one for part in parts.values() for one in part["figures"] if one["value"] == "not measured"
    ]
    assert not missing
    alike = [one for one in parts["correctness"]["figures"] if one["unit"] == "of tokens alike"]
    assert len(alike) == 3 and all(one["value"] == 1.0 for one in alike)
