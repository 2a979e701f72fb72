"""Laws of what is done to prompts, over every method found, and parity with transformers' own attention."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accel.ir.axis import find_axes
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.prefill import Pick
from accel.ir.tables import Tables
from accel.passes.prefill.prune._layer import deciding
from accel.passes.trained import Trained
from accel.runtime.session import core
from accel.runtime.session.prompt import _prompt_parts as prefill

from ..prefill_case import KEPT, LENGTHS, TOKENS, best, built, far, hiding, last_scores, module
from ..session_ways import variants
from ..spread import spread

AXIS = find_axes()["prefill.prune"]
NAMES = [  # of a random model
    n for n in AXIS.names() if not issubclass(AXIS.method(n), Tables | Trained)
]
PICK = [n for n in NAMES if Invariant.ALL_TOKENS_HELD in AXIS.build(n).breaks]
EXACT = [n for n in NAMES if n not in PICK]
ROWS = TOKENS[:, : LENGTHS.max()]


def taken(name, options):
    """Of these options those that the method has."""
    fields = {field.name for field in dataclasses.fields(AXIS.method(name))}
    return {option: value for option, value in options.items() if option in fields}


def pruned(name, arch="llama", target="eager", **options):
    """A build that drops some of 30 tokens."""
    found = {**AXIS.small(name), **taken(name, {"tokens": KEPT}), **options}
    return built(arch, target, use=name, **found)


def whole(name):
    """Options with which nothing is dropped."""
    return taken(name, {"tokens": int(LENGTHS.max()), "share": 1.0})


def prompted(model, tokens=ROWS, lengths=LENGTHS, after=0):
    """Logits after the prompts, and of `after` single tokens."""
    with model.session(len(tokens)) as session:
        out = [session.prompt(tokens, lengths)]
        out += [session.run(TOKENS[: len(tokens), [30 + i]]) for i in range(after)]
        return np.concatenate(out, axis=1), session.lengths


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PICK)
def test_what_is_no_longer_than_the_budget_is_seen_whole(name):
    model, base = pruned(name, **whole(name)), built("llama")
    got, want = prompted(model, after=3), prompted(base, after=3)
    assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    prompts = [list(row[:n]) for row, n in zip(ROWS, LENGTHS, strict=True)]
    assert model.generate(prompts, 6, eos=[]).tokens == base.generate(prompts, 6, eos=[]).tokens
    assert model.report["grade"] == "approximate"
    assert (
        far(prompted(pruned(name))[0], want[0][:, :1]) > 1e-3
    )  # the control: shorter, and it differs


def law_of_exact_methods(name):
    """Prompts, and what follows them, have the logits that they have without it."""
    (got, held), (want, long) = prompted(pruned(name), after=3), prompted(built("llama"), after=3)
    assert far(got, want) < 1e-5 and np.array_equal(held, long)


@pytest.mark.parametrize("name", EXACT)
def test_what_picks_nothing_changes_nothing(name):
    law_of_exact_methods(name)


@pytest.mark.parametrize("name", EXACT)
def test_the_law_of_exact_methods_catches_a_token_that_is_left_out(name, monkeypatch):
    part = core.SessionCore.part

    def lacking(self, entry, tokens, positions, slots, real):
        part(self, entry, tokens, np.where(positions == 3, -1, positions), slots, real)

    monkeypatch.setattr(core.SessionCore, "part", lacking)
    with pytest.raises(AssertionError):
        law_of_exact_methods(name)


@pytest.mark.parametrize("name", NAMES)
def test_run_sees_every_token(name):
    with pruned(name).session(3) as session:
        got = session.run(ROWS, LENGTHS, last_only=True)
        assert session.lengths.tolist() == LENGTHS.tolist()
    assert far(got, prompted(built("llama"))[0]) < 1e-5


@pytest.mark.few(6)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [512, 10])  # of 10: a last call of one token
def test_rows_are_pruned_as_if_alone(name, chunk, monkeypatch):
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", chunk)
    model = pruned(name)
    together, held = prompted(model, after=3)
    for row, n in enumerate(LENGTHS):
        with model.session() as session:
            alone = [session.prompt(ROWS[[row], :n])]
            alone += [session.run(TOKENS[[row], [[30 + i]]]) for i in range(3)]
            assert far(np.concatenate(alone, 1)[0], together[row]) < 1e-5
            assert session.length == held[row]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "arch"), spread("prefill.prune", NAMES, "llama", "gemma2", "gpt_neox")
)
def test_onnx_is_the_eager_oracle(name, arch):
    eager = pruned(name, arch)
    want, held = prompted(eager, after=3)
    compiled = pruned(name, arch, "onnx")
    for _, model in variants(compiled, None):
        got, lengths = prompted(model, after=3)
        assert far(got, want) < 1e-4 and np.array_equal(lengths, held)


SIZES = [
    (name, option)
    for name in NAMES
    for option in ("tokens", "share", "layer", "kernel")
    if option in {field.name for field in dataclasses.fields(AXIS.method(name))}
]


@pytest.mark.parametrize("name, option", SIZES)
def test_what_makes_no_sense_is_refused(name, option):
    with pytest.raises(RecipeError, match=f"prefill.prune.{name}: .*{option}"):
        AXIS.build(name, **{option: -2})


@pytest.mark.parametrize("name", [name for name, option in SIZES if option == "layer"])
def test_a_layer_that_is_not_there_is_refused(name):
    with pytest.raises(PassError, match=f"{name}: layer = 9, .* are 0, 1, 2"):
        pruned(name, layer=9)


# methods that prune between layers


STAGED = [name for name in NAMES if Invariant.UNIFORM_SLOTS in AXIS.build(name).breaks]


def law_of_stages(name):
    """Each stage keeps some of what the one before kept, in order, and the last token; the layers before the first
    hold what they hold without it.
    """
    with pruned(name).session(3) as session, built("llama").session(3) as whole:
        for each in (session, whole):
            each.prompt(ROWS, LENGTHS)
        got, want = state(session), state(whole)
    stages = sorted(n for n in got if n.startswith("kv.pos"))
    assert len(stages) > 1
    for row, count in enumerate(LENGTHS):
        before = set(range(count))
        for stage in stages[1:]:
            kept = got[stage][row]
            kept = kept[kept >= 0]
            assert (np.diff(kept) > 0).all() and {*kept.tolist()} <= before
            assert kept[-1] == count - 1
            before = {*kept.tolist()}
        assert count < 20 or len(before) < count
    assert far(got["kv.0.k"], want["kv.0.k"]) < 1e-6


@pytest.mark.parametrize("name", STAGED)
def test_stages_narrow(name):
    law_of_stages(name)


@pytest.mark.parametrize("broken", ["unordered", "oldest", "all"])
@pytest.mark.parametrize("name", STAGED)
def test_the_law_of_stages_catches(name, broken, monkeypatch):
    def picks(plan, scores, count):
        found = prefill.picks(plan, scores, count)
        if broken == "all":
            return np.arange(scores.size)
        return found[::-1] if broken == "unordered" else np.arange(found.size)

    monkeypatch.setattr("accel.runtime.session.prompt.pruning.picks", picks)
    with pytest.raises(AssertionError):
        law_of_stages(name)


# gemfilter


@pytest.mark.few(1)
@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "mistral", "gpt2"])
def test_gemfilter_shows_the_model_what_its_early_layer_picks(arch):
    model, layer = module(arch), 1
    got, held = prompted(pruned("gemfilter", arch, recent=3))
    assert held.tolist() == [KEPT, KEPT, 7]
    for row, n in enumerate(LENGTHS):
        tokens = ROWS[row, :n]
        pools = partial(F.avg_pool1d, kernel_size=5, stride=1, padding=2)
        scores = pools(last_scores(model, tokens, layer).sum(0)[None])[0]
        kept = best(scores, KEPT, 0, *range(n - 3, n))
        with torch.no_grad():
            want = model(torch.tensor(tokens[kept])[None]).logits[0, -1].numpy()
            other = model(torch.tensor(tokens[-KEPT:])[None]).logits[0, -1].numpy()
        assert far(got[row, 0], want) < 1e-4
        assert n <= KEPT or far(got[row, 0], other) > 1e-3  # the control: the newest tokens


def law_picks(picks):
    """As many as asked for, in order, the ends among them; the rest are the best."""
    rng = np.random.default_rng(0)
    for count in (1, 5, 9, 40):
        plan, scores = Pick(9, 2, 3), rng.normal(size=count).astype(np.float32)
        found = picks(plan, scores)
        assert found.tolist() == sorted(set(found.tolist())) and found.size == min(9, count)
        assert {*range(min(2, count)), *range(max(0, count - 3), count)} <= set(found.tolist())
        rest = np.setdiff1d(np.arange(count), found)
        inner = [i for i in found if 2 <= i < count - 3]
        assert not rest.size or scores[inner].min() >= scores[rest].max()
        scores[count // 2 :] = np.nan
        assert picks(plan, scores).size == min(9, count)
    few = picks(Pick(4, 2, 3), np.zeros(20, np.float32))  # of the ends, the newest go first
    assert few.tolist() == [0, 17, 18, 19]


def test_picks():
    law_picks(prefill.picks)


def test_a_share_is_of_the_whole_prompt():
    plan, scores = Pick(0, 0, 1, 0.29), np.arange(60, dtype=np.float32)
    assert [plan.tokens_kept(n) for n in (0, 1, 3, 100)] == [0, 1, 1, 29]
    assert prefill.picks(plan, scores, 100).tolist() == list(range(31, 60))
    assert prefill.picks(plan, scores).size == 17
    assert Pick(5, 0, 1, 0.29).tokens_kept(100) == 5 and Pick(50, 0, 1, 0.29).tokens_kept(100) == 29


@pytest.mark.parametrize("broken", ["unordered", "ends", "worst", "many"])
def test_the_law_of_picks_catches(broken):
    def picks(plan, scores):
        if broken == "many":
            return np.arange(scores.size)
        if broken == "ends":
            return prefill.picks(Pick(plan.tokens, 0, 0), scores)
        found = prefill.picks(plan, -scores if broken == "worst" else scores)
        return found[::-1] if broken == "unordered" else found

    with pytest.raises(AssertionError):
        law_picks(picks)


def test_gemfilter_in_a_session():
    model = pruned("gemfilter")
    with model.session() as session:
        session.prompt(TOKENS[:1, :40])
        assert session.length == KEPT and session.stats["calls"] == 2
        bytes_held = session.stats["kv_bytes"]
        later = session.prompt(TOKENS[:1, 40:])  # of a conversation that goes on: whole
        assert session.length == KEPT + 8
        session.rewind(KEPT)
        assert far(session.run(TOKENS[:1, 40:], last_only=True), later) < 1e-5
        session.rewind(0)
        assert session.prompt(TOKENS[:1, :9]).shape == (1, 1, model.facts.vocab_size)
        assert session.stats["calls"] == 5 and session.length == 9
        with pytest.raises(InputError, match="129 tokens; max_context is 128"):
            session.rewind(0)
            session.prompt(np.ones((1, 129), np.int64))
        with session.fork() as other:
            other.prompt(TOKENS[:1, :40])
            assert other.length == KEPT and other.stats["kv_bytes"] == bytes_held
    tokens = model.generate(
        list(TOKENS[0]) + [5] * 16, 20, eos=[]
    )  # a full context, filtered, has room
    assert len(tokens.tokens[0]) == 20


@pytest.mark.long
def test_gemfilter_shares_the_weights_and_checks_its_entry():
    compiled, base = pruned("gemfilter", target="onnx"), built("llama", "onnx")
    weights = {m: m.artifact.files["weights.bin"].bytes for m in (compiled, base)}
    assert weights[compiled] == weights[base]
    assert compiled.report["errors"]["filter"] < 1e-4
    entry = compiled.artifact.entries["filter"]
    assert entry.outputs == ("scores",) and entry.inputs == ("tokens", "positions", "slots", "rows")


# promptdistill


def distilled(model, tokens, layer, kept=KEPT):
    """The positions that go on, by transformers' own attention."""
    scores = last_scores(model, tokens, layer).mean(0)
    scores[-1] = 0
    near = F.avg_pool1d(scores[None], 5, stride=1, padding=2)[0]
    return best(near, kept, len(tokens) - 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "gpt2"])
def test_deeper_layers_see_what_promptdistill_picks(arch):
    model = module(arch)
    got, held = prompted(pruned("promptdistill", arch), after=3)
    assert np.array_equal(held, LENGTHS + 3)
    for row, n in enumerate(LENGTHS):
        tokens = np.concatenate([ROWS[row, :n], TOKENS[row, 30:33]])
        kept = distilled(model, tokens[:n], 1)
        assert far(got[row], hiding(model, tokens, kept, 1)[n - 1 :]) < 1e-4
        other = [*range(n - len(kept), n)]  # the control: the newest tokens
        assert n <= KEPT or far(got[row], hiding(model, tokens, other, 1)[n - 1 :]) > 1e-3


def state(session):
    return {n: v.numpy() for n, v in session._core.backend._state.items()}


def test_first_layers_hold_the_whole_prompt_and_the_others_what_was_picked(monkeypatch):
    monkeypatch.setattr("accel.runtime.session.core.STEP", 4)
    with pruned("promptdistill").session(3) as session, built("llama").session(3) as whole:
        for each in (session, whole):
            each.prompt(ROWS, LENGTHS)
        got, want = state(session), state(whole)
        for part in "kv":
            for layer in (0, 1):
                assert far(got[f"kv.{layer}.{part}"], want[f"kv.{layer}.{part}"]) < 1e-6
            assert got[f"kv.2.{part}"].shape[2] == KEPT and want[f"kv.2.{part}"].shape[2] == 32
        for row, n in enumerate(LENGTHS):
            found = got["kv.pos.1"][row]
            kept = distilled(module("llama"), ROWS[row, :n], 1)
            assert found[found >= 0].tolist() == kept
        cache = sum(v.nbytes for n, v in want.items() if n.startswith("kv.2"))
        saved = cache * (32 - KEPT) // 32
        assert whole.stats["kv_bytes"] - session.stats["kv_bytes"] == saved - 3 * 8 * KEPT


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_promptdistill_rewinds_to_its_end_or_to_nothing(target, monkeypatch):
    monkeypatch.setattr("accel.runtime.session.core.STEP", 4)
    model = pruned("promptdistill", target=target)
    one = slice(0, 1)
    with model.session() as session, model.session() as fresh, built("llama").session() as whole:
        session.run(TOKENS[one, :25])  # what lies in the slots is in nobody's way later
        session.rewind(0)
        first = session.prompt(ROWS[one])
        assert far(first, fresh.prompt(ROWS[one])) < 1e-6
        assert session.held_from.tolist() == [30]
        with pytest.raises(
            InputError, match="to 29: deeper layers dropped .* of 30.*; give 30 or more, or 0"
        ):
            session.rewind(29)
        later = [s.run(TOKENS[one, 30:37]) for s in (session, fresh)]
        with session.fork() as other:
            other.rewind(32)
            again = other.run(TOKENS[one, 32:37])
        assert far(later[0], later[1]) < 1e-6 and far(again, later[0][:, 2:]) < 1e-5
        assert (
            far(session.prompt(TOKENS[one, 37:]), fresh.run(TOKENS[one, 37:], last_only=True))
            < 1e-6
        )
        session.rewind(0)
        assert session.held_from.tolist() == [0]
        assert far(session.run(TOKENS[one]), whole.run(TOKENS[one])) < 1e-5
        session.rewind(3)
        assert (
            far(session.run(TOKENS[one, 3:9]), whole.run(TOKENS[one, 3:9])) > 1e-3
        )  # other contexts
        whole.rewind(3)
        assert far(session.run(TOKENS[one, 9:12]), whole.run(TOKENS[one, 3:12])[:, 6:]) < 1e-5


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"kv.codec": {"use": "kivi"}},
            "kivi cannot be combined with prefill.prune = promptdistill: .*; leave one of the two out .*gemfilter",
        ),
        (
            {"numerics": {"use": "batch-invariant"}},
            "batch-invariant cannot be combined with prefill.prune = promptdistill",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(tables, words):
    with pytest.raises(RecipeError, match=words):
        built("llama", tables=tables, use="promptdistill")


def test_of_two_layers_the_first_decides_what_the_other_reads():
    layers = [SimpleNamespace(attention="causal", shares=None)] * 2
    program = SimpleNamespace(facts=SimpleNamespace(encoder=None, layers=layers))
    assert [deciding(program, "some", -1, 13 / 32, last=last) for last in (False, True)] == [0, 1]
    program.facts.layers = layers[:1]
    assert deciding(program, "some", -1, 13 / 32, last=False) == 0, "it has no other"


def test_a_last_layer_has_nothing_to_save():
    with pytest.raises(PassError, match="no layer comes after layer 2 of 3"):
        pruned("promptdistill", layer=2)
