"""The joints for methods to come: each is a folder of files that nobody ships, and touches no other file."""

from pathlib import Path

import models
import numpy as np
import pytest

import accel
from accel.ir import entries
from accel.runtime import draft
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft import Tree
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.speculative import Speculative
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.spec_chain import SpecChain

from ..draft_case import plain, rows_of

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 3, 11, 7], [2, 8]]


@pytest.fixture
def joint(monkeypatch):
    """joint(name) -> its files; they are in the axes' folders meanwhile."""

    def get(name):
        for package in (draft, entries):
            folder = HERE / name / package.__name__.rpartition(".")[2]
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        entries.kinds.cache_clear()
        return sorted(p.name for p in (HERE / name).rglob("*.py"))

    yield get
    monkeypatch.undo()
    entries.kinds.cache_clear()


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_a_head_reads_a_hidden_state_and_drafts_from_it(joint, target, tmp_path):
    assert joint("hidden_head") == ["_hidden_head_pass.py", "head.py", "hidden_head.py"]
    recipe = {"draft": {"use": "hidden-head", "layer": 0}}
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    model = accel.optimize(
        models.llama(), recipe, target=target, max_context=64, max_batch=2, **out
    )
    with model as compiled:
        method = compiled.decoding()[1].methods["draft"]
        with compiled.session(2) as session:
            assert session.extra == ("hidden.0",)
            want = plain(compiled.session(2), rows_of(PROMPTS, limit=12, max_context=64))
            rows = rows_of(PROMPTS, limit=12, max_context=64)
            context = DecodeContext(
                {"draft": method, "verify": SpecChain(), "length": Fixed(1), "tree": Chain()}, None, compiled
            )  # fmt: skip
            list(Speculative().tokens(session, rows, context))
        assert [row.tokens for row in rows] == want
        assert all(row.drafting["drafted"] > 0 for row in rows)
        law_states_are_those_of_the_tokens(compiled, method, want[0])


def law_states_are_those_of_the_tokens(compiled, method, new):
    """Whatever calls they ran in, rejected drafts among them."""
    ids = [*PROMPTS[0], *new]
    with compiled.session() as session:
        whole = session.step([ids], want=["hidden.0"]).extra["hidden.0"]
    with compiled.session() as session:
        drafters = method.open(session, rows_of(PROMPTS[:1]), DecodeContext())
        session.prompt([ids[:5]])
        at = 5
        while at < len(ids) - 3:
            drafted = drafters.draft({0: 1}, None)[0]
            assert isinstance(drafted, Tree) and len(drafted) == 1
            session.run([[*ids[at : at + 2], int(drafted.tokens[0])]])
            session.rewind(at + 2)
            at += 2
        held = drafters._hidden.states[:, :at]
        np.testing.assert_allclose(held, whole[:, :at], atol=2e-4, rtol=1e-3)
        drafters.close()
        session.run([[1]])  # nobody listens any more
        assert not np.allclose(held, np.roll(held, 1, 1)), "the control: positions differ"
