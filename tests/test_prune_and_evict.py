"""Eviction where deeper layers hold fewer tokens of a prompt: prefill.prune with kv.score."""

import gc
import weakref

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.backends.eager import EagerSession

from .prefill_case import LENGTHS, TOKENS, built, far
from .session_ways import variants

AXES = find_axes()
STAGED = [
    name
    for name in AXES["prefill.prune"].names()
    if Invariant.UNIFORM_SLOTS in AXES["prefill.prune"].build(name).breaks
]
BRIEF = [("lazyllm", "snapkv"), ("promptdistill", "h2o")]
SCORES = ["knorm", "snapkv", "h2o"]  # of keys, of queries, of accumulated attention
PAIRS = [  # two of them always
    pytest.param(prune, score, marks=[] if (prune, score) in BRIEF else [pytest.mark.long])
    for prune in STAGED
    for score in SCORES
]
ROWS = TOKENS[:, : LENGTHS.max()]
KEPT = 6


def pruned(prune, score=None, target="eager", tokens=KEPT, **options):
    tables = {}
    if score:
        tables["kv.score"] = {"use": score, **AXES["kv.score"].small(score)}
        tables["kv.budget"] = {"use": "uniform", "tokens_kept": tokens}
        tables["kv.when"] = {"use": "prompt"}
    if prune:
        found = {**AXES["prefill.prune"].small(prune), **options}
        found |= {"tokens": 12} if prune == "promptdistill" and not options else {}
        return built("llama", target, tables, use=prune, **found)
    return built("llama", target, tables)


def prompted(model, tokens=ROWS, lengths=LENGTHS, after=4, first=30):
    with model.session(len(tokens)) as session:
        out = [session.prompt(tokens, lengths)]
        for i in range(after):
            out.append(session.run(TOKENS[: len(tokens), [first + i]]))
        return np.concatenate(out, axis=1)


def state(session):
    return {n: v.numpy() for n, v in session._core.backend._state.items()}


@pytest.mark.long
@pytest.mark.parametrize(("prune", "score"), PAIRS)
def test_a_budget_of_all_tokens_evicts_nothing(prune, score):
    assert far(prompted(pruned(prune, score, tokens=64)), prompted(pruned(prune))) < 1e-5
    cut = prompted(pruned(prune, score))
    assert far(cut, prompted(pruned(prune))) > 1e-3  # the control: a small budget


@pytest.mark.long
@pytest.mark.parametrize(
    "score", ["snapkv", *(pytest.param(s, marks=pytest.mark.long) for s in ("knorm", "h2o"))]
)
def test_where_nothing_is_dropped_the_same_is_evicted(score):
    whole = pruned("fastkv", score, share=1.0)
    assert far(prompted(whole), prompted(pruned(None, score))) < 1e-5
    assert far(prompted(pruned("fastkv", score)), prompted(whole)) > 1e-3  # the control


@pytest.mark.long
@pytest.mark.parametrize(("prune", "score"), PAIRS)
def test_rows_are_evicted_as_if_alone(prune, score):
    model = pruned(prune, score)
    together = prompted(model)
    for row, n in enumerate(LENGTHS):
        with model.session() as session:
            alone = [session.prompt(ROWS[[row], :n])]
            alone += [session.run(TOKENS[[row], [[30 + i]]]) for i in range(4)]
        assert far(np.concatenate(alone, 1)[0], together[row]) < 1e-5


def smallest_norms(keys, positions, count):
    """The positions with the smallest keys, of each head: keys [G,S,D], positions [S]."""
    there = positions >= 0
    order = np.linalg.norm(keys[:, there], axis=-1).argsort(-1, kind="stable")[:, :count]
    return [sorted(positions[there][head].tolist()) for head in order]


@pytest.mark.few(1)
@pytest.mark.parametrize("prune", STAGED)
def test_each_layer_chooses_of_what_reached_it(prune):
    with pruned(prune).session(3) as before, pruned(prune, "knorm").session(3) as after:
        for session in (before, after):
            session.prompt(ROWS, LENGTHS)
        old, new = state(before), state(after)
    stages = [n for n in old if n.startswith("kv.pos")]
    differs = False
    for layer in range(3):
        slots = old[f"kv.{layer}.k"].shape[2]
        holding = [n for n in stages if old[n].shape[1] == slots]
        for row in range(3):
            found = [sorted(p[p >= 0].tolist()) for p in new[f"kept.{layer}.pos"][row]]
            keys = old[f"kv.{layer}.k"][row]
            could = [smallest_norms(keys, old[name][row], KEPT) for name in holding]
            assert found in could
            every = smallest_norms(keys, np.arange(slots), KEPT)  # the control: of all slots
            differs |= found != every
    assert differs


@pytest.mark.parametrize("target", ["eager", "onnx"])
@pytest.mark.few(1)
def test_queries_of_a_prompt_do_not_outlive_it(target):
    """They are as large as the prompt, and of all layers."""
    with pruned(None, "snapkv", target).session() as session:
        given, backend = [], session._core.backend
        step = backend.step

        def spied(*args, **options):
            out = step(*args, **options)
            given.extend(weakref.ref(array) for array in out.extra.values())
            return out

        backend.step = spied
        session.prompt(TOKENS[:1, :40])
        session.run(TOKENS[:1, 40:41])
        gc.collect()
        assert given and not any(array() is not None for array in given)


@pytest.mark.parametrize("target", ["eager", "onnx"])
@pytest.mark.few(1)
def test_a_session_that_starts_anew_sees_nothing_of_the_prompt_before(target):
    """Right after that was evicted, when buffers for later tokens are not made yet."""
    model = pruned("promptdistill", "snapkv", target)
    with model.session() as session, model.session() as new:
        session.prompt(TOKENS[:1, :40])
        session.rewind(0)
        for part in (slice(40, 44), slice(44, 45)):  # short enough to be left whole
            assert far(session.run(TOKENS[1:2, part]), new.run(TOKENS[1:2, part])) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("prune", "score"),
    [("lazyllm", "snapkv"), pytest.param("promptdistill", "h2o", marks=pytest.mark.long)],
)
def test_onnx_is_the_eager_oracle(prune, score):
    want = prompted(pruned(prune, score))
    compiled = pruned(prune, score, "onnx")
    for _, model in variants(compiled, None):
        assert far(prompted(model), want) < 1e-4


@pytest.mark.parametrize("score", ["snapkv", pytest.param("knorm", marks=pytest.mark.long)])
def test_rewinds_and_forks(score):
    model = pruned("promptdistill", score)
    one = slice(0, 1)
    with model.session() as session, model.session() as fresh:
        first = session.prompt(ROWS[one])
        later = session.run(TOKENS[one, 30:36])
        with pytest.raises(InputError, match="cannot rewind"):
            session.rewind(29)
        with session.fork() as other:
            other.rewind(32)
            assert far(other.run(TOKENS[one, 32:36]), later[:, 2:]) < 1e-5
        session.rewind(30)
        assert far(session.run(TOKENS[one, 30:36]), later) < 1e-5
        session.rewind(0)
        assert far(session.prompt(ROWS[one]), first) < 1e-5
        assert far(session.run(TOKENS[one, 30:36]), later) < 1e-5
        session.rewind(0)
        assert (
            far(session.run(ROWS[one], last_only=True), fresh.run(ROWS[one], last_only=True)) < 1e-5
        )


def test_eviction_at_every_call_goes_on_in_deeper_layers():
    tables = {
        "kv.score": {"use": "streaming-llm", "sinks": 1},
        "kv.budget": {"use": "uniform", "tokens_kept": 5},
        "kv.when": {"use": "every", "tokens": 3},
    }
    model = built("llama", tables=tables, use="promptdistill", tokens=12)
    looked = 0
    with model.session() as session:
        session.prompt(ROWS[:1])
        for end in range(31, 41):
            session.run(TOKENS[:1, [end - 1]])
            found = state(session)
            if "kv.pos" not in found:
                continue  # it was just compressed
            looked += 1
            for layer in range(3):
                recent = found["kv.pos" if layer < 2 else "kv.pos.1"][0]
                recent = recent[(recent >= 0) & (recent < end)]
                for head in found[f"kept.{layer}.pos"][0]:
                    held = [*head[head >= 0].tolist(), *recent.tolist()]
                    assert sorted(set(held)) == held and held[-1] == end - 1
                    assert end < 34 or len(held) <= 5 + 3
    assert looked > 4


@pytest.mark.long
def test_a_choice_by_a_few_queries_counts_what_was_absorbed():
    """The sketch's share of attention is of each query: those that choose have theirs, of all."""
    tables = {
        "kv.score": {"use": "knorm", **AXES["kv.score"].small("knorm")},
        "kv.budget": {"use": "uniform", "tokens_kept": KEPT},
        "kv.keep": {"use": "subgen", **AXES["kv.keep"].small("subgen")},
    }
    found = {"use": "lazyllm", **AXES["prefill.prune"].small("lazyllm")}
    first, second = (prompted(built("llama", t, tables, **found)) for t in ("eager", "onnx"))
    assert np.isfinite(first).all() and far(first, second) < 1e-4


@pytest.mark.parametrize("fails", [0, 1])
def test_a_prompt_that_fails_leaves_nothing_to_the_next(monkeypatch, fails):
    """The queries of the parts that had run do not vote on it."""
    model, shorter = pruned("promptdistill", "snapkv"), LENGTHS - 6
    want = prompted(model, lengths=shorter)
    with model.session(3) as session:
        part, made = EagerSession.part, []

        def failing(self, entry, given):
            made.append(entry)
            if len(made) > fails:
                raise MemoryError
            return part(self, entry, given)

        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(EagerSession, "part", failing)
            session.prompt(ROWS, LENGTHS)
        assert session.lengths.tolist() == [0, 0, 0]
        out = [session.prompt(ROWS, shorter)]
        out += [session.run(TOKENS[:, [i]]) for i in range(30, 34)]
    assert far(np.concatenate(out, axis=1), want) < 1e-4


def test_a_prompt_of_which_layers_drop_tokens_may_be_marked():
    model = pruned("promptdistill", "finch")
    with model.session(1) as session:
        session.mark(question=20)
        session.prompt(ROWS[:1])
        session.run(TOKENS[:1, [30]])
