"""Recurrent state goes back into the last call by running the recurrences alone (`passes/state/replay.py`)."""

import models
import numpy as np
import pytest

import accel
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.entries.replay import REPLAY, TAKEN
from accel.ir.ops.recurrence import RECURRENT
from accel.ir.spec import verify
from accel.passes.state.replay import Replay
from accel.runtime.session.state.recurrent_history import WIDEST

from .session_case import session_of
from .session_ways import close

# convolutions and scans; a gated sum; sums of weights; matrices and peaks; matrices that erase
MODELS = ["jamba", "recurrent_gemma", "rwkv", "xlstm", "rwkv_x"]


@pytest.fixture(scope="module", autouse=True)
def rwkv_x():
    """Among the models that fixtures find by name."""
    models.ARCHITECTURES["rwkv_x"] = models.rwkv_x
    yield
    del models.ARCHITECTURES["rwkv_x"]


def replaying(program):
    assert Replay().run(program).changed
    verify(program, "Replay")
    return program


def tokens_of(program, *shape, seed=0):
    return np.random.default_rng(seed).integers(3, program.facts.vocab_size, shape)


def law(program, plain, batch=2):
    """Rows go back into a call of a few tokens, each to another one, and go on as if the rest had never been; no token
    runs again.
    """
    ids = tokens_of(program, batch, 60)
    with session_of(program, batch) as session, session_of(plain, batch) as anew:
        assert session.capabilities.free_drafts and not anew.capabilities.free_drafts
        session.run(ids[:, :9])
        texts = [row[:9].tolist() for row in ids]
        for turn, (counts, stood) in enumerate(
            [((5, 5), (2, 4)), ((6, 3), (1, 3)), ((4, 4), (0, 0))]
        ):
            draft = tokens_of(program, batch, max(counts), seed=turn + 1)
            session.run(draft, counts)
            before = session.stats["tokens"]
            texts = [
                text + row[:n].tolist() for text, row, n in zip(texts, draft, stood, strict=True)
            ]
            session.rewind([len(text) for text in texts])
            got = session.run(ids[:, 20 + turn : 21 + turn])
            assert session.stats["tokens"] - before == batch, "the new tokens alone"
            texts = [text + [int(row[20 + turn])] for text, row in zip(texts, ids, strict=True)]
            anew.rewind(0)
            lengths = [len(text) for text in texts]
            padded = np.array([text + [0] * (max(lengths) - len(text)) for text in texts])
            close(got, anew.run(padded, lengths, last_only=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*MODELS, pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def test_rows_go_back_into_the_last_call(stateful, name):
    law(replaying(stateful(name)), stateful(name))


def test_all_recurrences_are_among_these(stateful):
    found = {n.target for name in MODELS for n in stateful(name).nodes(*RECURRENT)}
    assert found == RECURRENT


@pytest.mark.parametrize("spoilt", ["restore", "positions"])
def test_a_replay_from_or_to_elsewhere_is_caught(stateful, monkeypatch, spoilt):
    program = replaying(stateful("jamba"))
    backend = type(session_of(program)._core.backend)
    if spoilt == "restore":
        monkeypatch.setattr(backend, "restore", lambda self, snapshot, rows: None)
    else:
        part = backend.part
        monkeypatch.setattr(
            backend,
            "part",
            lambda self, entry, given: part(
                self, entry, {**given, "positions": given["positions"] * 0}
            ),
        )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        law(program, stateful("jamba"))


def test_what_cannot_be_replayed_runs_again(stateful):
    """Before the last call, after rows changed places, and in a long call."""
    program, plain = replaying(stateful("jamba")), stateful("jamba")
    ids = tokens_of(program, 2, 100)
    with session_of(program, 2) as session, session_of(plain, 2) as anew:
        for one in (session, anew):
            one.run(ids[:, :9])
            one.run(ids[:, 9:14])
            one.rewind(7)
        close(session.run(ids[:, 50:52]), anew.run(ids[:, 50:52]))
        for one in (session, anew):
            one.run(ids[:, 9:14])
            one.rewind([11, 12])
            one.select([1, 0])
        close(session.run(ids[:, 60:61]), anew.run(ids[:, 60:61]))
        for one in (session, anew):
            one.run(ids[:, : WIDEST + 1])
            one.rewind([40, 30])
        close(session.run(ids[:, 60:61]), anew.run(ids[:, 60:61]))


def test_plain_decoding_asks_for_nothing(stateful, monkeypatch):
    program = replaying(stateful("jamba"))
    with session_of(program) as session:
        step, asked = session._core.backend.step, []
        monkeypatch.setattr(
            session._core.backend,
            "step",
            lambda *a, **k: (asked.append(list(a[4])), step(*a, **k))[1],
        )
        session.run([[5, 6, 7]])
        session.run([[8]])
        session.run([[9, 10]])
    assert [bool(names) for names in asked] == [False, False, True]
    assert all(name.startswith(TAKEN) for name in asked[2])


@pytest.fixture(scope="module")
def built():
    """A small Jamba of ONNX that drafts, and one that does not."""
    module, sizes = small_model("jamba"), {"max_context": 96, "max_batch": 2}
    with (
        accel.optimize(module, "prompt-lookup", **sizes) as model,
        accel.optimize(module, "base", verify=False, **sizes) as plain,
    ):
        yield model, plain


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.few(1)
def test_drafts_give_the_tokens_of_plain_decoding(built, sampled, monkeypatch):
    """Two rows that draft apart, some of whose drafts fall in part."""
    monkeypatch.setattr("accel.runtime.speculation.guard.Guard.limit", 4)
    model, plain = built
    piece = np.random.default_rng(1).integers(3, 101, 7)
    prompts = [np.tile(piece, 4)[:n].tolist() for n in (25, 18)]
    params = accel.SamplingParams(max_tokens=24, ignore_eos=True, **sampled)
    replays, part = [], type(plain.session()._core.backend).part
    monkeypatch.setattr(
        type(plain.session()._core.backend),
        "part",
        lambda self, entry, given: (replays.append(entry), part(self, entry, given))[1],
    )
    out = model.generate(prompts, sampling_params=params)
    assert out.tokens == plain.generate(prompts, sampling_params=params).tokens
    assert out.stats["speculation"]["drafted"] > out.stats["speculation"]["accepted"]
    assert REPLAY.name in replays
