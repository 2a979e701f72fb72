"""Rows of different counts get what they get padded, whatever their session does; one without tokens is left."""

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.axis import find_axes
from accel.ir.entries.flat import OWNER
from accel.ir.errors import PassError, RecipeError
from accel.ir.recipe import Recipe
from accel.lowering.triton.lowered import lower_program
from accel.runtime.backends.triton.backend import TritonBackend
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session import flat

from ..batch_case import tables, to_the_next_row, watched
from ..prefill_case import built, far

NAMES = find_axes()["batch"].names()
TEXT = np.random.default_rng(5).integers(3, 50, (3, 90))
PROMPTS = [30, 21, 7]
CALLS = [[1, 1, 1], [9, 1, 4], [0, 1, 0], [0, 5, 0], [2, 0, 3], [1, 0, 1], [4, 7, 1]]
NEAR = 2e-5
KIVI = {"kv.codec": {"use": "kivi", "residual": 8, "group": 8}}
KNORM = {"kv.score": {"use": "knorm"}, "kv.budget": {"use": "uniform", "tokens_kept": 12}}
UNEQUAL = {"kv.score": {"use": "knorm"}, "kv.budget": {"use": "ada-kv", "tokens_kept": 12}}


def on(arch, target, tables):
    if target != "triton":
        return built(arch, target, tables)
    made = built(arch, "eager", tables)
    program = lower_program(made.program)
    return CompiledModel(TritonBackend(program), made.facts, recipe=made.recipe, program=program)


def driven(model, order=(0, 1, 2)):
    """Logits of prompts and of calls of some tokens of each row, a rewind and a fork among them, rows in this order."""
    order, at, out = list(order), np.zeros(3, int), []
    text = TEXT[order] % model.facts.vocab_size

    def call(session, counts, run):
        counts = np.array(counts)[order]
        ids = np.zeros((3, counts.max()), int)
        for b, n in enumerate(counts):
            ids[b, :n] = text[b, at[b] : at[b] + n]
        out.append(run(ids, counts)[np.argsort(order)])
        at[:] += counts

    with model.session(3) as session:
        call(session, PROMPTS, session.prompt)
        for counts in CALLS:
            call(session, counts, session.run)
        back = np.array([1, 0, 1])[order]
        session.rewind(session.lengths - back)
        at -= back
        with session.fork() as other:
            call(other, [1, 6, 1], other.run)
    return out


def law(model, monkeypatch, change=None, near=NEAR):
    with monkeypatch.context() as patch:
        assert not watched(patch, False) and not (want := driven(model)) == []
    with monkeypatch.context() as patch:
        seen = watched(patch, True, change)
        got = driven(model)
        assert len(seen) >= 5, "calls were padded: nothing is tested"
        permuted = driven(model, (2, 0, 1))
    for a, b, c in zip(want, got, permuted, strict=True):
        assert far(b, a) < near and far(c, a) < near
        assert (a.argmax(-1) == b.argmax(-1)).all() and (a.argmax(-1) == c.argmax(-1)).all()


long = pytest.mark.long
CASES = [
    ("llama", {}, "eager"),
    ("mistral", KIVI, "eager"),
    pytest.param("gemma2", UNEQUAL, "eager", marks=long),
    pytest.param("plain_latent", KNORM, "eager", marks=long),
    pytest.param("gpt2", {"kv.reuse": {"use": "paged-prefix", "block": 4}}, "eager", marks=long),
    pytest.param("llama", {"weights": {"use": "int8"}}, "eager", marks=long),
    pytest.param("mistral", {"kv.codec": {"use": "kv-int8"}}, "onnx", marks=long),
    pytest.param("gemma2", {}, "onnx", marks=long),
    pytest.param("llama", KIVI, "onnx", marks=long),
    pytest.param("llama", UNEQUAL, "onnx", marks=long),
    pytest.param("gemma2", {"kv.codec": {"use": "kv-int8"}}, "triton", marks=long),
    pytest.param("llama", UNEQUAL, "triton", marks=long),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("arch", "more", "target"), CASES)
def test_rows_get_what_they_get_padded(name, arch, more, target, monkeypatch):
    law(on(arch, target, tables(name, more)), monkeypatch)


def a_slot_too_far(given):
    return {OWNER: given[OWNER] + [0, 1]}


def logits_of_the_token_before(given):
    return {"rows": np.maximum(given["rows"] - 1, 0)}


@pytest.mark.parametrize("broken", [to_the_next_row, a_slot_too_far, logits_of_the_token_before])
def test_a_wrong_owner_is_caught(broken, monkeypatch):
    with pytest.raises(AssertionError):
        law(built("llama", tables=tables("flat")), monkeypatch, broken)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"numerics": {"use": "batch-invariant"}}, "BATCH_INVARIANCE"),
        ({"kv.select": {"use": "quest"}}, "FULL_ATTENTION"),
        ({"loop": {"use": "lookahead"}}, "CHAINS"),
        ({"depth": {"use": "calm"}}, "ALL_LAYERS_RUN"),
    ],
)
def test_what_flat_calls_break_or_rely_on_is_refused(more, said):
    with pytest.raises(RecipeError, match=said):
        assemble(Recipe("mine", tables=tables("flat", more)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arch", "more", "said"),
    [
        ("mamba", {}, "only attention over the cache may"),
        ("llama", {"kv.codec": {"use": "quantspec-kv", "group": 8}}, "is also told coarse"),
    ],
)
def test_a_model_that_mixes_rows_otherwise_is_refused(arch, more, said):
    with pytest.raises(PassError, match=said):
        if arch != "mamba":
            built(arch, tables=tables("flat", more))
        accel.optimize(small_model(arch), tables("flat"), target="eager", verify=False)


def test_a_flat_call_is_taken_where_padding_is_much(monkeypatch):
    """By counted tokens; not where all are real, nor where few are not."""
    seen = watched(monkeypatch, False)
    monkeypatch.setattr(flat, "SHARE", 0.75)
    with built("llama", tables=tables("flat")).session(3) as session:
        for counts, taken in (
            ([9, 8, 7], 0),
            ([9, 1, 1], 1),
            ([0, 1, 1], 1),
            ([1, 1, 1], 0),
            ([0, 0, 0], 0),
        ):
            seen.clear()
            session.run(TEXT[:, : max(1, *counts)] % 50, counts)
            assert len(seen) == taken, counts
