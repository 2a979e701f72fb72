"""batch = flat beside a head: what heads read of rows of different counts is what they read padded."""

import numpy as np
import pytest

import accel
from accel.ir.taps import is_tap
from accel.runtime.session import core

from ...batch_case import to_the_next_row, watched
from ...heads_case import (
    eagle1_folder,
    eagle1_tensors,
    eagle3_folder,
    eagle3_tensors,
    llama_in,
    mctp_folder,
    mctp_tensors,
)

PROMPTS = [[5, 9, 3, 11, 7, 30, 2, 8, 4, 6, 12, 40], [2, 8, 60], [9]]
COUNTS = np.array([12, 3, 1])


def folder_of(use, module, path):
    if use == "eagle3":
        return eagle3_folder(path, eagle3_tensors(48, 48, 101, 101), 48, 101)
    if use == "eagle1":
        return eagle1_folder(path, module, eagle1_tensors(module))
    return mctp_folder(path, module, mctp_tensors(module, 3))


def build(home, use, target="eager", **more):
    recipe = {
        "draft": {"use": use, "path": str(home / use), "weights": ""},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed", "tokens": 3},
        "batch": {"use": "flat"},
    }
    return accel.optimize(home, recipe, target=target, max_context=64, max_batch=3, **more)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    module, home = llama_in(tmp_path_factory.mktemp("target"), 5)
    for use in ("eagle1", "eagle3", "mctp"):
        folder_of(use, module, home / use)
    with accel.optimize(home, target="eager", max_context=64, max_batch=3) as plain:
        return home, plain.generate(PROMPTS, max_new_tokens=12).tokens


def read(model):
    """All that heads may read of a call of rows of these counts, row by row without padding."""
    tokens = np.zeros((3, 12), np.int64)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    with model.session(3) as session:
        names = [name for name in session.extra if is_tap(name)]
        out = session.step(tokens, COUNTS, want=names)
    assert names and sorted(names) == sorted(out.extra)
    return np.concatenate([out.extra[n][b, :c] for n in names for b, c in enumerate(COUNTS)])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("use", "target"),
    [
        ("eagle3", "eager"),
        pytest.param("eagle1", "onnx", marks=pytest.mark.long),
        pytest.param("mctp", "eager", marks=pytest.mark.long),
    ],
)
def test_a_head_reads_what_it_reads_padded(home, tmp_path, monkeypatch, use, target):
    """And tokens are those of plain decoding. The control: a token that is given to the next row."""
    folder, wanted = home
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with build(folder, use, target, **out) as model:
        with monkeypatch.context() as patch:
            patch.setattr(core, "pays", lambda real, computed: False)
            padded = read(model)
        with monkeypatch.context() as patch:
            seen = watched(patch, True)
            assert np.abs(read(model) - padded).max() < 2e-5
            assert model.generate(PROMPTS, max_new_tokens=12).tokens == wanted
        assert len(seen) > 5, "calls were padded: nothing is tested"
        with monkeypatch.context() as patch:
            watched(patch, True, to_the_next_row)
            assert np.abs(read(model) - padded).max() > 1e-2
