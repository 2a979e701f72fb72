"""Rows join a session and leave it, and each goes on as it would alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest

import accel
from accel.ir.errors import InputError
from accel.ir.state import Part, name_of
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.backends.onnx.session import OrtSession
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session.prompt.prefix_cache import PrefixCache

from .kv_case import evicting
from .prefill_case import built, far
from .test_encoder_decoder import make
from .test_saved_sessions import MORE
from .test_session_capabilities import CASES

TOKENS = np.random.default_rng(11).integers(3, 50, (3, 60))
LENGTHS = (24, 17, 29)  # of the prompts
CLOSE = 1e-4
TABLE = name_of(Part.TABLE)


def alone(model, row, calls):
    """The logits of one row after its prompt, in calls of these widths."""
    with model.session() as session:
        out, at = [session.prompt(TOKENS[row : row + 1, : LENGTHS[row]])], LENGTHS[row]
        for width in calls:
            out.append(session.run(TOKENS[row : row + 1, at : at + width]))
            at += width
        return np.concatenate(out, axis=1)[0]


def together(model, calls=(1, 1, 4, 1), later=(1, 3, 1)):
    """Three rows: two begin, the third joins after two calls; then the first leaves. Logits of each, call by call."""
    found, at = {0: [], 1: [], 2: []}, dict(enumerate(LENGTHS))

    def run(session, rows, width):
        part = np.stack([TOKENS[row, at[row] : at[row] + width] for row in rows])
        logits = session.run(part)
        for row, one in zip(rows, logits, strict=True):
            found[row].append(one)
            at[row] += width

    with model.session(2) as session:
        longest = max(LENGTHS[:2])
        logits = session.prompt(TOKENS[:2, :longest], np.array(LENGTHS[:2]))
        found[0].append(logits[0])
        found[1].append(logits[1])
        for width in calls[:2]:
            run(session, [0, 1], width)
        other = model.session()
        found[2].append(other.prompt(TOKENS[2:, : LENGTHS[2]])[0])
        held = [*session.lengths, *other.lengths]
        session.join(other)
        assert session.batch == 3 and session.lengths.tolist() == held
        for width in calls[2:]:
            run(session, [0, 1, 2], width)
        order = session.leave(0)
        rows = order.tolist()
        assert sorted(rows) == [1, 2]
        for width in later:
            run(session, rows, width)
    return {row: np.concatenate(logits) for row, logits in found.items()}


def check(model):
    got = together(model)
    want = [
        alone(model, row, w)
        for row, w in enumerate(((1, 1, 4, 1), (1, 1, 4, 1, 1, 3, 1), (4, 1, 1, 3, 1)))
    ]
    for row, logits in enumerate(want):
        assert far(got[row], logits) < CLOSE, f"row {row} goes on otherwise"


def model_of(name, stateful):
    if name in MORE:
        return built("mistral" if name == "window" else "llama", tables=MORE[name])
    tables, _ = CASES[name]
    if name not in ("mamba", "falcon_h1"):
        return built("llama", tables=tables)
    program = copy.copy(stateful(name))
    program.facts = replace(program.facts, max_batch=3)
    if tables:
        evicting(program, tables)
    return CompiledModel(EagerBackend(program), program.facts, recipe={"tables": tables})


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_rows_go_on_as_alone(name, stateful):
    model = model_of(name, stateful)
    with model.session() as session:
        joins = session.capabilities.joins
    assert joins == CASES[name][1].joins if name in CASES else True
    if not joins:
        with model.session(2) as session, model.session() as other:
            session.prompt(TOKENS[:2, :9])
            other.prompt(TOKENS[2:, :9])
            with pytest.raises(InputError, match="rows cannot join sessions of this model"):
                session.join(other)
            session.run(TOKENS[:2, :1])
            other.run(TOKENS[2:, :1])
        return
    check(model)


@pytest.mark.parametrize("evicted", [(True, False), (False, True), (True, True)])
@pytest.mark.few(1)
def test_a_recurrent_row_goes_back_behind_what_was_evicted_before_it_joined(stateful, evicted):
    """What was evicted cannot be run again, so the state as it was then must stay."""
    model, lengths = model_of("falcon_h1", stateful), [24 if one else 6 for one in evicted]

    def begun(row):
        session = model.session()
        session.prompt(TOKENS[row : row + 1, : lengths[row]])
        session.run(TOKENS[row : row + 1, 30:33])
        return session

    alone, (session, other) = [begun(row) for row in (0, 1)], [begun(row) for row in (0, 1)]
    session.join(other)
    for one, want in ((session, lengths), (alone[0], lengths[:1]), (alone[1], lengths[1:])):
        one.rewind(np.array(want) + 1)
    got = session.run(TOKENS[:2, 40:42])
    for row, one in enumerate(alone):
        assert far(got[row], one.run(TOKENS[row : row + 1, 40:42])[0]) < CLOSE


ONNX = ["base", "paged-prefix", "snapkv", "kivi-4", "quest", "promptdistill"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ONNX)
def test_rows_go_on_as_alone_in_onnx(name):
    check(built("llama", "onnx", tables=CASES[name][0]))


def test_a_row_that_is_not_copied_is_caught(monkeypatch):
    right = OrtSession.leave
    monkeypatch.setattr(OrtSession, "leave", lambda self, rows: right(self, np.arange(rows.size)))
    with pytest.raises(AssertionError, match="goes on otherwise"):
        check(built("llama", "onnx"))


def test_blocks_of_another_row_are_caught(monkeypatch):
    def joined(self, backend, other):
        right(self, backend, other)
        backend.put({TABLE: np.roll(backend.buffers()[TABLE], 1, axis=0)})

    right = PrefixCache.join
    monkeypatch.setattr(PrefixCache, "join", joined)
    with pytest.raises(AssertionError, match="goes on otherwise"):
        check(built("llama", tables=CASES["paged-prefix"][0]))


@pytest.mark.long
def test_rows_of_an_encoder_decoder_are_refused():
    model = accel.optimize(make("t5"), target="eager", max_context=64, max_batch=2)
    with model.session() as session, model.session() as other:
        with pytest.raises(
            InputError, match="rows cannot join sessions of this model .EncoderInput"
        ):
            session.join(other)


def test_joining_copies_the_rows_that_join():
    """While there is room: the others stay where they are."""
    model = built("llama", "onnx")
    with model.session() as session:
        session.prompt(TOKENS[:1, :20])
        for row in (1, 2):
            other = model.session()
            other.prompt(TOKENS[row : row + 1, :20])
            session.join(other)
            session.run(TOKENS[:2, 20:21])
            if row == 1:
                session.leave(1)
                session.run(TOKENS[:1, 21:22])
                before = {n: a.ctypes.data for n, a in session._core.backend.buffers().items()}
        after = {n: a.ctypes.data for n, a in session._core.backend.buffers().items()}
        assert before == after


def test_what_cannot_join_is_refused_and_changes_nothing():
    model, another = built("llama"), built("llama", tables=CASES["snapkv"][0])
    with model.session(2) as session, model.session(2) as two, another.session() as other:
        session.prompt(TOKENS[:2, :9])
        for wrong, words in (
            (session, "another session"),
            (other, "another session"),
            (two, "4 rows are more than"),
        ):
            with pytest.raises(InputError, match=words):
                session.join(wrong)
        for rows, words in (
            ([0, 1], "all rows would leave"),
            (2, "2 is not a row"),
            ([], "rows have shape"),
        ):
            with pytest.raises(InputError, match=words):
                session.leave(rows)
        assert session.batch == 2 and session.lengths.tolist() == [9, 9]
        two.close()
        with pytest.raises(InputError, match="closed"):
            session.join(two)
        session.run(TOKENS[:2, 9:10])
