"""Every kernel compiles for GPUs that are not here: what its file says in VARIANTS (`triton_ahead.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.lowering.triton import kernels

HERE = Path(__file__).parent
FILES = sorted(p.stem for p in Path(kernels.__path__[0]).glob("[!_]*.py"))
CHIP = 99 << 10  # bytes that every GPU since 8.0 has for a program
SPILLED = 512  # bytes of a thread, at most
ON_TENSOR_CORES = {"attend", "draw", "multiply"}
EXACT = {"place_coded", "steps_of"}  # which round as the reference does


def compiled(capability: int, cache: Path, *files: str) -> list[dict]:
    root = str(Path(kernels.__path__[0]).parents[3])  # of the package, whichever checkout it is in
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": root}
    script = [sys.executable, str(HERE / "triton_ahead.py"), str(capability), *files]
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(line: dict) -> None:
    assert line["shared"] <= CHIP, line
    assert line["stack"] + line["local"] <= SPILLED, f"registers are spilled: {line}"
    assert line["products"] or line["kernel"] not in ON_TENSOR_CORES, f"no tensor cores: {line}"
    assert line["exact"] or line["kernel"] not in EXACT, f"codes would differ: {line}"


def test_every_kernel_is_in_a_file_of_its_own():
    text = {name: (Path(kernels.__path__[0]) / f"{name}.py").read_text() for name in FILES}
    assert {name for name, t in text.items() if f"def {name}(" in t and "VARIANTS" in t} == set(
        FILES
    )
    assert {"attend", "draw", "merge", "multiply", "place", "rotate", "steps_of"} <= set(FILES)


def test_small_kernels_compile(tmp_path):
    small = [name for name in FILES if name not in ON_TENSOR_CORES]
    lines = compiled(90, tmp_path, *(f"{name}:0" for name in small))
    assert [line["kernel"] for line in lines] == small
    for line in lines:
        check(line)


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", FILES)
def test_a_kernel_compiles_for_gpus_that_are_not_here(name, capability, tmp_path):
    lines = compiled(capability, tmp_path, name)
    assert lines and {line["kernel"] for line in lines} == {name}
    for line in lines:
        check(line)


def test_what_does_not_fit_is_seen():
    fits = {"kernel": "attend", "shared": 0, "stack": 0, "local": 0, "products": 3, "exact": 0}
    check(fits)
    for wrong in ({"shared": 128 << 10}, {"local": 4096}, {"products": 0}, {"kernel": "steps_of"}):
        with pytest.raises(AssertionError):
            check(fits | wrong)
