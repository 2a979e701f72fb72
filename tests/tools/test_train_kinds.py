"""tools/train: each trained method is of one kind, and a kind that is new to the folder is found."""

import pytest
import run
import train

from accel.compiler.train.runs import absorb, aimed, fit, head, rounds, soft, table
from accel.runtime.length import Base
from accel.runtime.length._head import OfTokens
from accel.runtime.length._of_rounds import OfRounds

KINDS = {
    "trim-kv": soft.SoftRun, "threshold-evict": aimed.AimedRun, "less": absorb.AbsorbRun,
    "tokenbutler": fit.FitRun, "specdec-pp": head.HeadRun, "q-filter": table.Measured,
}  # fmt: skip


def test_each_method_is_of_one_kind():
    methods = train.trained_methods()
    assert all(sum(kind.takes(m) for kind in run.kinds()) == 1 for m in methods.values())
    assert {name: run.kind_of(methods[name]) for name in KINDS} == KINDS
    assert "knorm" not in methods


def test_a_length_with_a_head_is_found_by_its_base():
    assert run.kind_of(type("Own", (OfRounds,), {})) is rounds.Logged
    assert run.kind_of(type("Own", (OfTokens,), {})) is head.HeadRun
    assert run.kind_of(type("Own", (Base,), {"trained": "", "key": "own"})) is None


def test_a_file_is_a_kind(tmp_path, monkeypatch):
    (tmp_path / "rote.py").write_text(
        "from run import Kind\n\n\nclass Rote(Kind):\n    @classmethod\n    def takes(cls, method):\n"
        "        return method is dict\n\n    make = None\n"
    )
    assert run.kind_of(dict) is None
    run.kinds.cache_clear()
    monkeypatch.setattr(run.runs, "__path__", [*run.runs.__path__, str(tmp_path)])
    assert run.kind_of(dict).__name__ == "Rote"
    run.kinds.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["knorm"], "method with a trained part 'knorm' does not exist"),
        (["trim-kv", "elsewhere"], "give the text to train on, as --text FILE"),
        (["trim-kv", "--resume"], "is not there: leave --resume out"),
        (["trim-kv", "--rate", "0"], "rate must be more than 0"),
    ],
    ids=str,
)
def test_the_tool_says_what_is_wrong(arguments, why, tmp_path, monkeypatch):
    out = str(tmp_path / "x.safetensors")
    monkeypatch.setattr("sys.argv", ["train.py", *arguments, "--out", out])
    with pytest.raises(SystemExit, match=why):
        train.main()
