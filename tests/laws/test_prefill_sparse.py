"""Laws of prompts whose segments read some of the keys, over every method found, and parity of each."""

import dataclasses

import numpy as np
import pytest

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import RecipeError

from ..prefill_case import TOKENS, built, critical, far, module
from ..session_ways import oracle, variants
from ..spread import spread

AXIS = find_axes()["prefill.sparse"]
NAMES = AXIS.names()
LENGTHS = np.array([45, 29, 7])
ROWS = TOKENS[:, :45]


def sparse(name, arch="llama", target="eager", tables=None, **options):
    return built(
        arch,
        target,
        {"prefill.sparse": {"use": name, **AXIS.small(name), **options}, **(tables or {})},
    )


def prompted(model, tokens=ROWS, lengths=LENGTHS, after=3):
    with model.session(len(tokens)) as session:
        out = [session.prompt(tokens, lengths)]
        out += [session.run(TOKENS[: len(tokens), [45 + i]]) for i in range(after)]
        assert session.lengths.tolist() == [n + after for n in lengths]
        return np.concatenate(out, axis=1)


def state(session):
    return {n: v.numpy() for n, v in session._core.backend._state.items()}


@pytest.mark.long
@pytest.mark.parametrize("options", [{"threshold": 48}, {"budget": 48}, {"segment": 40}], ids=str)
def test_prompts_below_the_sizes_read_all_keys(options):
    """The session decides, by sizes that all methods have."""
    want = prompted(built("llama"))
    assert far(prompted(sparse("critiprefill", **options)), want) < 1e-5
    assert far(prompted(sparse("critiprefill")), want) > 1e-3  # the control


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_short_prompts_and_calls_read_all_keys(name):
    base, model = built("llama"), sparse(name)
    assert far(prompted(model), prompted(base)) > 1e-3  # the control
    with model.session(3) as session, base.session(3) as whole:
        assert far(session.run(ROWS, LENGTHS), whole.run(ROWS, LENGTHS)) < 1e-6
        later = session.prompt(TOKENS[:, 45:], [3, 3, 3])
        assert far(later, whole.prompt(TOKENS[:, 45:], [3, 3, 3])) < 1e-6
    prompts = [list(row[:n]) for row, n in zip(ROWS, LENGTHS, strict=True)]
    short = [p[:8] for p in prompts]
    assert model.generate(short, 5, eos=[]).tokens == base.generate(short, 5, eos=[]).tokens


@pytest.mark.few(1)
def test_the_end_of_a_prompt_reads_everything_where_single_tokens_choose():
    """What is left behind the last whole segment is part of it where it is so little that its tokens would choose."""
    tokens, counts = np.random.default_rng(6).integers(3, 50, (3, 118)), np.array([118, 77, 0])
    quest, found = {"use": "quest", **find_axes()["kv.select"].small("quest")}, []
    for tables in ({}, {"kv.select": quest}):
        model = sparse("critiprefill", segment=36, tables=tables)
        with model.session(3) as session:
            found.append(session.prompt(tokens, counts))
            assert session.stats["calls"] == 4
    assert far(*found) < 1e-4 and not found[0][2].any()
    for row, count in enumerate(counts[:2]):
        with model.session() as session:
            alone = session.prompt(tokens[[row], :count])
            assert far(alone[0], found[0][row]) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_all_keys_is_the_whole_model(name, monkeypatch):
    options = {f.name for f in dataclasses.fields(AXIS.method(name))}
    whole = {"share": 1.0} if "share" in options else {}
    model, calls = sparse(name, budget=16, threshold=16, **whole), []
    part = accel.runtime.backends.eager.EagerSession.part
    monkeypatch.setattr(
        accel.runtime.backends.eager.EagerSession,
        "part",
        lambda self, entry, given: calls.append(entry) or part(self, entry, given),
    )
    lengths = np.array([31, 25, 7])  # the segment from 16 on chooses among 16 tokens
    tokens = ROWS[:, :31]
    assert far(prompted(model, tokens, lengths), prompted(built("llama"), tokens, lengths)) < 1e-5
    assert calls == ["sparse"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_layers_hold_what_they_do_in_the_whole_model(name):
    with sparse(name).session(3) as session, built("llama").session(3) as whole:
        for each in (session, whole):
            each.prompt(ROWS, LENGTHS)
        got, want = state(session), state(whole)
        for key in want:
            held = got[key][0, ..., :45, :] if key != "kv.pos" else got[key][0, :45]
            right = want[key][0, ..., :45, :] if key != "kv.pos" else want[key][0, :45]
            if key.startswith("kv.2"):
                assert far(held, right) > 1e-3
            else:
                assert far(held, right) < 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_as_if_alone(name):
    model = sparse(name)
    together = prompted(model)
    for row, n in enumerate(LENGTHS):
        with model.session() as session:
            alone = [session.prompt(ROWS[[row], :n])]
            alone += [session.run(TOKENS[[row], [[45 + i]]]) for i in range(3)]
        assert far(np.concatenate(alone, 1)[0], together[row]) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "arch"), spread("prefill.sparse", NAMES, "llama", "gemma2"))
def test_onnx_is_the_eager_oracle(name, arch):
    want, compiled = prompted(sparse(name, arch)), sparse(name, arch, "onnx")
    assert compiled.report["errors"]["sparse"] < 1e-4
    for _, model in variants(compiled, None):
        assert far(prompted(model), want) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama:4", "gpt_neox", "gpt2"])
def test_critiprefill_is_what_its_paper_says(arch):
    got, model = prompted(sparse("critiprefill", arch)), module(arch)
    cut = AXIS.small("critiprefill")
    for row, n in enumerate(LENGTHS):
        tokens = np.concatenate([ROWS[row, :n], TOKENS[row, 45:48]])
        assert far(got[row], critical(model, tokens, n, **cut)[n - 1 :]) < 1e-4
        # the controls: fewer blocks; the first choice stays, which only a layer after the second can tell
        others = [{"budget": 4}, *([{"fusion": 1.0}] if arch == "llama:4" else [])]
        for other in others:
            wrong = critical(model, tokens, n, **{**cut, **other})
            assert n < 40 or far(got[row], wrong[n - 1 :]) > 1e-4


@pytest.mark.long
def test_minference_s_search_is_built_and_read():
    """With the weights in 4 bits, of a text of the caller's."""
    options = {**AXIS.small("minference"), "searched": True}
    tables = {"prefill": {"sparse": {"use": "minference", **options}}, "weights": {"use": "int4"}}
    text = np.random.default_rng(5).integers(3, 50, (4, 40)).tolist()
    found = accel.optimize(
        module("llama"), tables, max_context=64, max_batch=3, calibration=text, verify=False
    )
    with found as made:
        (note,) = [n for n in made.report["notes"] if n.startswith("minference")]
        assert note.startswith("minference: of 6 KV heads ")
        want = prompted(oracle(made))
        for _, model in variants(made):
            assert far(prompted(model), want) < 2e-3


@pytest.mark.long
def test_what_a_prompt_keeps_is_chosen_when_it_is_whole():
    tables = {
        "kv.score": {"use": "snapkv", "window": 4},
        "kv.budget": {"use": "uniform", "tokens_kept": 12},
    }
    want, got = (
        prompted(sparse("critiprefill", target=t, tables=tables)) for t in ("eager", "onnx")
    )
    assert far(got, want) < 1e-4
    model = sparse("critiprefill", tables=tables)
    with model.session(3) as session:
        session.prompt(ROWS, LENGTHS)
        found = state(session)
        kept = {n: v for n, v in found.items() if n.startswith("kept.") and n.endswith("pos")}
        assert all(v.shape[2] == 12 for v in kept.values()) and len(kept) == 3
        assert session.held_from.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"segment": 0}, "segment is 0"),
        ({"threshold": -1}, "threshold is -1; give at least 0"),
        ({"block": 3}, "must be multiples of block = 3"),
        ({"fusion": 1.5}, "fusion is 1.5"),
        ({"use": "tri-shape", "sinks": -1}, "sinks is -1; give at least 0"),
        ({"use": "tri-shape", "sinks": 4096}, "sinks is 4096"),
        ({"use": "minference", "columns": 0}, "columns is 0; give at least 1"),
        ({"use": "minference", "columns": 4096}, "columns is 4096; give at most budget = 3072"),
        (
            {"use": "minference", "columns": 1000},
            "less columns = 1000 must be multiples of block = 64",
        ),
        ({"use": "minference", "observe": 0}, "observe is 0; give 1 to 4096"),
        ({"use": "minference", "observe": 1024}, "observe is 1024; give at most segment = 512"),
        ({"use": "minference", "sinks": 1025}, "sinks is 1025; give at most columns = 1024"),
        ({"use": "minference", "near": -1}, "near is -1; give at least 0"),
        ({"use": "pbs-attn", "share": 0.0}, "share is 0.0; give more than 0 and at most 1"),
        ({"use": "pbs-attn", "share": 1.5}, "share is 1.5"),
        ({"use": "pbs-attn", "observe": 0}, "observe is 0"),
        ({"use": "flexprefill", "tau": 2.0}, "tau is 2.0; give 0 to 1"),
        ({"use": "flexprefill", "tau": float("nan")}, "tau is nan; give 0 to 1"),
        ({"use": "flexprefill", "least": 5000}, "least is 5000; give at most budget = 4096"),
        ({"use": "flexprefill", "share": float("nan")}, "share is nan"),
        ({"use": "flexprefill", "observe": 0}, "observe is 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options, words):
    name = options.get("use", "critiprefill")
    with pytest.raises(RecipeError, match=f"{name}.*{words}"):
        AXIS.build(name, **{n: v for n, v in options.items() if n != "use"})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"prefill.prune": {"use": "promptdistill"}},
            "critiprefill cannot be combined with prefill.prune = promptdistill: .*the same slots.*gemfilter",
        ),
        (
            {"kv.score": {"use": "h2o"}},
            "h2o cannot be combined with prefill.sparse = critiprefill: .*every query attends to every key",
        ),
        (
            {"numerics": {"use": "batch-invariant"}},
            "batch-invariant cannot be combined with prefill.sparse = critiprefill",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(tables, words):
    with pytest.raises(RecipeError, match=words):
        sparse("critiprefill", tables=tables)


def test_a_context_without_such_segments_is_left_as_it_is():
    compiled = built("llama", tables={"prefill.sparse": {"use": "critiprefill"}})
    assert compiled.facts.prefill is None and "sparse" not in compiled.program.entries
    (step,) = [s for s in compiled.report["steps"] if s["name"] == "CritiPrefill"]
    assert "prompts of at most 128 tokens read all keys" in step["refused"][0]


@pytest.mark.long
def test_a_choice_among_many_blocks_is_built():
    """More of them than the slots that shapes are worked out with."""
    model = sparse("critiprefill", "llama", "eager", segment=2, block=1, budget=38, threshold=38)
    want = prompted(built("llama"))
    assert far(prompted(model)[2], want[2]) < 1e-5 < far(prompted(model)[0], want[0])
    large = sparse("critiprefill", "gpt_neox", segment=1, block=1, budget=126, threshold=0)
    assert large.facts.prefill.segments.threshold == 126
