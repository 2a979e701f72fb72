"""Rows that go on as other rows: what comes after is what each would have given alone, whatever a recipe keeps."""

from dataclasses import replace
from inspect import signature

import numpy as np
import pytest

import accel
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.errors import AccelError, InputError
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.rows import by_row
from accel.runtime.session.observers import observer_classes
from accel.runtime.session.rows import Kin

from .kv_case import evicting
from .prefill_case import built, far
from .session_ways import singles
from .test_saved_sessions import MORE
from .test_session_capabilities import AT_PROMPT, CASES, evicts

LENGTHS = [24, 17, 9]
TURNS = [[2, 0, 0, 1], [1, 3, 2, 0], [0, 0, 1, 3], [3, 1, 0]]  # each then decodes NEW tokens
NEW = 3


@pytest.fixture(scope="module")
def opened(stateful):
    """opened(name) -> batch -> an empty session of a recipe; `name`: of CASES, with ":onnx" on that target."""
    made = {}

    def get(name):
        case, _, target = name.partition(":")
        tables, _ = CASES[case]
        if name not in made and case == "mamba":
            if target:
                made[name] = accel.optimize(small_model(case), max_context=64, max_batch=4).session
            else:
                program = stateful(case)
                made[name] = CompiledModel(EagerBackend(program), program.facts).session
        elif name not in made and case == "falcon_h1":
            made[name] = evicting(stateful(case), tables).session
        elif name not in made:
            made[name] = built("llama", target or "eager", tables=tables).session
        return made[name]

    return get


def law(open_session, back=0):
    """After each turn every row gives what it would alone. `back`: of a turn's tokens, how many are taken back before
    the next.
    """
    rng = np.random.default_rng(5)
    prompts = rng.integers(3, 50, (3, max(LENGTHS)))
    alone = [open_session(1) for _ in LENGTHS]
    for session, prompt, n in zip(alone, prompts, LENGTHS, strict=True):
        session.prompt(prompt[None, :n])
    with open_session(3) as session:
        session.prompt(prompts, LENGTHS)
        for rows in TURNS:
            session.select(rows)
            alone = [alone[row].fork() for row in rows]
            tokens = rng.integers(3, 50, (len(rows), NEW))
            got = singles(session, tokens)
            for row, one in enumerate(alone):
                assert far(got[row], singles(one, tokens[[row]])[0]) < 2e-3, (rows, row)
            assert session.batch == len(rows)
            assert session.lengths.tolist() == [one.length for one in alone]
            for each in (session, *alone) if back else ():
                each.rewind(each.lengths - back)


EAGER = ["kivi-4", "h2o", "quest", "paged-prefix", "promptdistill", "unified-skip"]
ONNX = ["base", "snapkv", "mamba"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*EAGER, *(f"{name}:onnx" for name in ONNX)])
def test_rows_go_on_as_others(opened, name):
    law(opened(name))


@pytest.mark.parametrize("name", ["base:onnx", "mamba:onnx", "paged-prefix"])
def test_rows_go_on_after_a_rewind(opened, name):
    law(opened(name), back=2)


STAY = {  # what a observer must take along, and a recipe in which it does
    "RecurrentHistory": "mamba",
    "EvictionState": "h2o",
    "BlockCodecState": "kivi-4",
    "PrefixCache": "paged-prefix",
    "PromptPruning": "promptdistill",
}


def knowing():
    """The classes of observers that know something of each row."""
    return [c for c in observer_classes() if "batch" in signature(c).parameters]


def test_every_observer_takes_its_rows_along():
    assert {c.__name__ for c in knowing()} > set(STAY)
    assert all(by_row(c) for c in knowing())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", STAY)
def test_the_law_catches_a_observer_that_does_not(opened, name, monkeypatch):
    (cls,) = (c for c in knowing() if c.__name__ == name)
    monkeypatch.setattr(cls, "select", lambda self, rows: None)
    with pytest.raises((AssertionError, IndexError, ValueError, AccelError)):
        law(opened(STAY[name]), back=2 if name == "RecurrentHistory" else 0)


@pytest.mark.parametrize(
    "broken",
    [
        {"slots": lambda self, rows, lengths, base: (int(self.upto.min()) + 2, int(lengths.max()))},
        {"slots": lambda self, rows, lengths, base: (0, int(lengths.max()) - 1)},
        {"rewound": lambda self, lengths: replace(self)},
    ],
    ids=["late", "short", "rewound"],
)
def test_the_law_catches_rows_that_share_less_than_they_are_said_to(opened, monkeypatch, broken):
    for name, method in broken.items():
        monkeypatch.setattr(Kin, name, method)
    with pytest.raises(AssertionError):
        law(opened("base:onnx"), back=2 if "slots" in broken else 0)
        forgets(opened("base:onnx"))


def forgets(open_session):
    """Copies of a row that are taken back to before they were made share no more than is left."""
    rng = np.random.default_rng(2)
    prompt, new = rng.integers(3, 50, 12), rng.integers(3, 50, (2, 8))
    with open_session(1) as session:
        session.prompt([prompt])
        session.select([0, 0])
        session.rewind(4)
        session.run(new)
        session.select([1, 0])
        got = session.run([[7], [8]])[:, 0]
    for logits, row, token in zip(got, (1, 0), (7, 8), strict=True):
        with open_session(1) as one:
            assert far(logits, one.run([[*prompt[:4], *new[row], token]])[0, -1]) < 2e-3


def test_copies_taken_back_to_before_they_were_made(opened):
    forgets(opened("base:onnx"))


def test_a_copy_of_a_row_that_was_taken_back_shares_as_little_as_it(opened):
    """Of three copies one goes back before they were made; another becomes it, then changes places with the third."""
    rng = np.random.default_rng(4)
    prompt, new = rng.integers(3, 50, 12), rng.integers(3, 50, (3, 9))
    with opened("base:onnx")(1) as session:
        session.prompt([prompt])
        session.select([0, 0, 0])
        session.rewind([4, 12, 12])
        session.run(new)
        session.select([0, 0, 2])
        session.select([0, 2, 1])
        got = session.run([[7], [8], [9]])[:, 0]
    held = [[*prompt[:4], *new[0]], [*prompt, *new[2]], [*prompt[:4], *new[0]]]
    for logits, row, token in zip(got, held, (7, 8, 9), strict=True):
        with opened("base:onnx")(1) as one:
            assert far(logits, one.run([[*row, token]])[0, -1]) < 2e-3


def test_rows_that_joined_share_nothing(opened):
    """Though they were copies of a row each; and what they share with others stays theirs when one leaves."""
    texts = np.random.default_rng(3).integers(3, 50, (2, 12))
    with opened("base:onnx")(1) as session, opened("base:onnx")(1) as other:
        for one, text in zip((session, other), texts, strict=True):
            one.prompt([text])
            one.select([0, 0])
        other.select([0])
        session.join(other)
        session.select([2, 1, 0])
        got = list(session.run([[5], [6], [7]])[:, 0])
        session.leave(0)
        session.select([1, 0])
        got += list(session.run([[8], [9]])[:, 0])
    first, second = texts
    wanted = [[*second, 5], [*first, 6], [*first, 7], [*first, 6, 8], [*first, 7, 9]]
    for logits, text in zip(got, wanted, strict=True):
        with opened("base:onnx")(1) as one:
            assert far(logits, one.run([text])[0, -1]) < 2e-3, text


def test_what_rows_share_is_not_copied(opened):
    """Copies of one row differ in what came since; a fork knows that too."""
    with opened("base")(1) as session:
        session.prompt([np.arange(3, 30)])
        session.select([0, 0, 0])
        session.run([[4], [5], [6]])
        session.run([[7], [8], [9]])
        with session.fork() as other:
            for live in (session, other):
                assert live._core.kin.slots(np.array([1, 0, 2]), live.lengths, 0) == (27, 29)
        session.rewind([20, 28, 29])
        assert session._core.kin.slots(np.array([0, 2, 1]), session.lengths, 0) == (27, 29)
        assert session._core.kin.slots(np.array([1, 0, 2]), session.lengths, 0) == (20, 28)
        assert session._core.kin.slots(np.array([0, 0, 2]), session.lengths, 0) == (20, 28)
        session.select([2, 0])
        assert session._core.kin.slots(np.array([1, 0]), session.lengths, 0) is None


def test_more_rows_than_the_last_call_had_are_compressed():
    """By a recipe whose tokens then take other positions."""
    tables = evicts("snapkv", AT_PROMPT, keep="key-rerotate")
    model, tokens = built("llama", tables=tables), np.random.default_rng(6).integers(3, 50, (3, 31))
    tokens[2] = tokens[1]
    with model.session(2) as session, model.session(3) as other:
        session.run(tokens[:2, :30])
        session.select([0, 1, 1])
        other.run(tokens[:, :30])
        for one in (session, other):
            one.end_prompt()
        assert far(session.run(tokens[:, 30:]), other.run(tokens[:, 30:])) < 1e-5


def test_rows_that_share_slots_do_not_share_the_attention_that_these_drew():
    """Tokens that came since leave theirs in the slots of the prompt, too."""
    model, tokens = built("llama", "onnx", tables=evicts("h2o", AT_PROMPT)), np.arange(3, 15)
    with model.session(1) as session, model.session(2) as other:
        session.run([tokens])
        session.select([0, 0])
        session.run([[20], [30]])
        session.select([1, 0])
        other.run([tokens, tokens])
        other.run([[30], [20]])
        held, want = (one._core.backend.buffers() for one in (session, other))
        for name in (n for n in held if held[n].size):
            assert far(held[name], want[name]) < 1e-4, name
        for one in (session, other):
            one.end_prompt()
        assert far(session.run([[5], [6]]), other.run([[5], [6]])) < 1e-4


def test_a_call_of_fewer_rows_that_fails_is_undone(monkeypatch):
    """Whatever the observers noted when there were more rows."""
    tokens = np.random.default_rng(6).integers(3, 50, (3, 31))
    with built("llama", tables=MORE["clusterkv"]).session(3) as session, session.fork() as other:
        for one in (session, other):
            one.prompt(tokens[:, :30])
            one.select([2, 0])
        with monkeypatch.context() as patch:
            patch.setattr(session._core.backend, "step", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.run(tokens[:2, 30:])
        assert np.array_equal(session.run(tokens[:2, 30:]), other.run(tokens[:2, 30:]))


def test_copies_share_nothing_once_what_came_since_was_compressed():
    kin, swap, lengths = Kin(np.zeros(2, int), np.full(2, 10)), np.array([1, 0]), np.full(2, 20)
    assert kin.slots(swap, lengths, np.full(2, 10)) == (0, 10)
    assert kin.slots(swap, lengths, np.array([12, 12])) is None
    assert kin.slots(swap, lengths, np.array([12, 10])) is None


def test_a_fork_keeps_its_rows(opened):
    with opened("base:onnx")(1) as session:
        session.prompt([np.arange(3, 30)])
        with session.fork() as other:
            session.select([0, 0])
            assert (session.batch, other.batch) == (2, 1)
            assert far(other.run([[5]])[0], session.run([[5], [6]])[0]) < 1e-4


@pytest.mark.parametrize(
    ("rows", "words"),
    [([2], "rows: 2 is not a row; this session has rows 0..1"), ([-1], "-1 is not a row"), ([], "rows have shape .0."),
     ([[0]], "rows have shape .1, 1."), ([0.5], "rows: float64 is not an integer type")],
)  # fmt: skip
def test_rows_that_are_none(opened, rows, words):
    with opened("base")(2) as session:
        session.run([[4, 5], [6, 7]])
        with pytest.raises(InputError, match=words):
            session.select(rows)
        assert session.batch == 2 and session.lengths.tolist() == [2, 2]
