"""What a request says of drafted text: how it reaches a loop, and functions that are wrong."""

from dataclasses import dataclass

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.prompts import prompted
from accel.runtime.loop import Base
from accel.runtime.model.compiled import CompiledModel


@dataclass(frozen=True)
class Asks(Base):
    """Ends a row where its judge says no."""

    takes = frozenset({"judge"})

    def tokens(self, session, rows, context):
        logits = prompted(session, rows)
        while True:
            rows[0].accept(rows[0].pick(logits[0, 0]), logits[0, 0])
            yield 0, rows[0].tokens[-1]
            if rows[0].finish:
                return
            logits = session.run([[rows[0].tokens[-1]]])
            if context.judge is not None and not context.judge("drafted", str(rows[0].tokens[-1])):
                rows[0].finish = "stop"
                return


@pytest.fixture(scope="module")
def model(toy):
    artifact = open_artifact(toy.path)
    with CompiledModel(OrtBackend(artifact), artifact.facts, artifact=artifact) as made:
        made._loop = Asks()
        yield made


def test_a_loop_asks_it(model):
    told = []

    def twice(drafted, own):
        told.append((drafted, own))
        return np.bool_(len(told) < 3)

    (whole,) = model.generate([5, 17, 200], 9, eos=[]).tokens
    assert len(whole) == 9
    assert model.generate([5, 17, 200], 9, eos=[], judge=twice).tokens == [whole[:3]]
    assert told == [("drafted", str(token)) for token in whole[:3]]
    assert list(model.stream([5, 17, 200], 9, eos=[], judge=lambda *_: False)) == whole[:1]


def fails(drafted, own):
    return 1 / 0


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ("yes", "judge = 'yes': give a function"),
        (fails, r"judge \(fails\) raised ZeroDivisionError: .*; it is called with two texts"),
        (lambda drafted: True, "judge .*raised TypeError"),
        (lambda drafted, own: "yes", "returned 'yes'; return True where"),
        (lambda drafted, own: None, "returned None; return True where"),
        (lambda drafted, own: np.ones(2, bool), "returned .*; return True where"),
    ],
    ids=["text", "raises", "arguments", "word", "none", "several"],
)
def test_what_is_no_judge_is_said(model, judge, words):
    with pytest.raises(InputError, match=words):
        model.generate([5, 17, 200], 9, eos=[], judge=judge)
    assert len(model.generate([5, 17, 200], 9, eos=[], judge=lambda *_: True).tokens[0]) == 9


def test_a_loop_that_asks_none_takes_none(toy):
    artifact = open_artifact(toy.path)
    with CompiledModel(OrtBackend(artifact), artifact.facts, artifact=artifact) as plain:
        for start in (plain.generate, plain.stream):
            with pytest.raises(
                InputError, match="drafts no steps of text .* 'lookahead-reasoning'"
            ):
                start([5, 17, 200], 9, judge=lambda *_: True)
