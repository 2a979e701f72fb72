"""What was measured lies in the cache as JSON: a damaged or hostile file is no figure, and neither crash nor hang."""

import json
import os

import pytest

from accel.runtime.backends.onnx import machine
from accel.runtime.backends.onnx.tune import _kept
from accel.runtime.decode.costs import TOKENS, known

KEY = {"cpu": "one"}
posix = pytest.mark.skipif(os.name != "posix", reason="pipes and links")


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The file of costs that were kept, which are right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine.remember("costs", KEY, costs())
    assert known(KEY) is not None
    (found,) = (tmp_path / "accel" / "costs").iterdir()
    return found


def costs(**changes):
    return {"tokens": list(TOKENS[:3]), "seconds": [1.0, 1.5, 2.0], "runs": 1, **changes}


TEXTS = {
    "deep": "[" * 10**6,
    "digits": '{"key": {"cpu": "one"}, "value": ' + "9" * 10**5 + "}",
    "float": '{"key": {"cpu": "one"}, "value": 1e999}',
    "NaN": '{"key": {"cpu": "one"}, "value": NaN}',
    "bytes": "\udcff",
    "long": '"' + "x" * (1 << 21) + '"',
    "empty": "",
    "list": "[]",
    "cut": '{"key": {"cpu": "one"}, "value": {"tokens": [1',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_text_that_is_no_measurement(text, file):
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert machine.recall("costs", KEY) is None and known(KEY) is None


VALUES = [
    None, [], "x", 1, {},
    costs(tokens=[]), costs(tokens=[1, 2, 10**17]), costs(tokens=[1, 1, 2]), costs(tokens=4),
    costs(tokens=["a", 2, 3]), costs(tokens=None), costs(tokens=[[1], 2, 3]),
    costs(seconds=[0, 1, 2]), costs(seconds=[1, -1, 2]), costs(seconds=[1, 2]), costs(seconds="abc"),
    costs(seconds=[1, None, 2]), costs(runs="many"), costs(runs=None), costs(runs={}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_that_are_no_costs(value, file):
    file.write_text(json.dumps({"key": KEY, "value": value}))
    assert known(KEY) is None


NAMES = ("grouped", "fused")
CELL = {"tokens": 1, "context": 512, "seconds": {"grouped": 1.0, "fused": 0.5}}


@pytest.mark.parametrize(
    "value",
    [
        None, [], "x", 7, {}, {"costs": [], "refused": {}}, {"costs": 3, "refused": {}},
        {"costs": [CELL], "refused": {}}, {"costs": [CELL | {"seconds": []}], "refused": {}},
        {"costs": [CELL | {"tokens": None}], "refused": {}}, {"costs": [CELL], "refused": []},
        {"costs": [{}], "refused": {"grouped": "x", "fused": "y"}}, {"costs": ["x"], "refused": {}},
    ],
    ids=repr,
)  # fmt: skip
def test_values_that_are_no_choice(value):
    assert _kept(value, NAMES) is None


@posix
def test_what_is_no_plain_file_of_the_users_is_not_read(file, tmp_path):
    text = file.read_text()
    for spoil in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        file.unlink()
        spoil(file)
        assert known(KEY) is None
        file.rmdir() if file.is_dir() else file.unlink()
        file.write_text(text)
    assert known(KEY) is not None
    file.chmod(0o666)
    assert known(KEY) is None
    file.chmod(0o600)
    (tmp_path / "accel").chmod(0o777)
    assert known(KEY) is None
    machine.remember("costs", KEY, costs(runs=9))
    assert file.read_text() == text, "nor is anything kept where others can write"
