"""cache-augment: what its entries give is what transformers' own model does with a changed copy and the same
embeddings; its training sees each insertion alone; and what is refused.
"""

import copy
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import accel
from accel.compiler.assemble import assemble
from accel.compiler.explain import costs
from accel.compiler.over_state import over_state
from accel.compiler.smoke.tiny_models import small_model
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import augment
from accel.compiler.train.runs.augment import AHEAD, Augmented, AugmentRun
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.entries.augment import COPROCESS, EMBEDDED
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.invariants import PROVIDED, Invariant
from accel.ir.recipe import Recipe
from accel.passes.prefill.prune.cache_augment import BASE, GAIN, SOFT, CacheAugment
from accel.passes.trained import ALL, write
from accel.runtime.backends.buffers import STEP
from accel.runtime.session.prompt.latents import PromptLatents

from ....laws.test_invariants import TRIALS, holds
from ....prefill_case import CONTEXT, LENGTHS, TOKENS, built, far, module
from ....session_ways import variants
from ....test_sharing import gemma3n

N, AFTER, BEHIND = 3, 4, 5
ROWS = TOKENS[:, : LENGTHS.max()]


def made(name="llama", behind=0):
    """A coprocessor of random numbers beside a module, and its parts."""
    program = over_state(capture(module(name), max_context=CONTEXT))
    soft = Augmented(program, CacheAugment(latents=N, behind=behind))
    parts, generator = soft.start(2, 0), torch.Generator().manual_seed(1)
    for key, tensor in parts[ALL].items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(tensor * (1 + 0.3 * noise) if key in (SOFT, GAIN, BASE) else 0.3 * noise)
        tensor.copy_(tensor.half())  # as its file holds it
    return soft, parts


def kept(made, folder):
    soft, parts = made
    file = folder / "coprocessor.safetensors"
    write(soft.method, file, parts, soft.names, {})
    options = {"trained": str(file), "latents": N, "behind": soft.method.behind}
    return soft, parts, {"use": "cache-augment", **options}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Latents come last."""
    return kept(made(), tmp_path_factory.mktemp("augment"))


@pytest.fixture(scope="module")
def between(tmp_path_factory):
    """They come before the last tokens of a prompt."""
    return kept(made(behind=BEHIND), tmp_path_factory.mktemp("between"))


def second(model, parts):
    """The coprocessor as a module: a copy whose weights have the low-rank products added."""
    other = copy.deepcopy(model)
    weights = dict(other.named_parameters())
    for key in (key for key in parts if key.endswith(".a")):
        name = key.removesuffix(".a")
        delta, group = (parts[key] @ parts[f"{name}.b"]).T, re.search(r"\{(.*)\}", name)
        some = [name] if group is None else [
            name.replace(group.group(), one) for one in group.group(1).split(",")
        ]  # fmt: skip
        pieces = delta.split([len(weights[one]) for one in some])
        for one, piece in zip(some, pieces, strict=True):
            weights[one].data += piece
    return other


@torch.no_grad()
def oracle(model, parts, row, after, behind=0):
    """Logits [1+n,V] after a prompt [T] that latents extend, before its last tokens, and after tokens [n]."""
    coprocessor, lookup = second(model, parts), model.get_input_embeddings()
    cut = max(1, len(row) - behind)
    row, after = row[:cut], [*row[cut:], *after]
    past = model(torch.tensor(row)[None], use_cache=True).past_key_values
    own = coprocessor.model(inputs_embeds=parts[SOFT][None], past_key_values=copy.deepcopy(past))
    latents = own.last_hidden_state * parts[GAIN] + parts[BASE]
    stream = torch.cat((latents, lookup(torch.tensor(after)[None])), 1)
    found = model(inputs_embeds=stream, past_key_values=past).logits
    return found[0, N - 1 + len(after) - AFTER :].numpy()


def prompted(model, tokens=ROWS, lengths=LENGTHS):
    """Logits [B,1+AFTER,V] after prompts, and after single tokens."""
    with model.session(len(tokens)) as session:
        out = [session.prompt(tokens, lengths)]
        held = session.lengths
        out += [session.run(TOKENS[: len(tokens), [30 + i]]) for i in range(AFTER)]
    return np.concatenate(out, axis=1), held


def law_of_the_second_model(model, parts, behind=0):
    found, held = prompted(model)
    assert held.tolist() == (LENGTHS + N).tolist()
    for row, count, got in zip(ROWS, LENGTHS, found, strict=True):
        at = TOKENS[list(map(tuple, ROWS)).index(tuple(row)), 30 : 30 + AFTER]
        assert far(got, oracle(module("llama"), parts, row[:count], at, behind)) < 1e-4


def test_the_last_tokens_of_a_prompt_are_read_behind_latents(between):
    _, parts, table = between
    model = built("llama", **table)
    law_of_the_second_model(model, parts[ALL], BEHIND)
    with pytest.raises(AssertionError):
        law_of_the_second_model(model, parts[ALL], BEHIND - 1)
    other = built("llama", "onnx", **table)
    assert far(prompted(other)[0], prompted(model)[0]) < 1e-4
    with model.session(2) as session:  # a prompt of one token, and none
        assert np.isfinite(session.prompt(ROWS[:2], [1, 0])).all()
        assert session.lengths.tolist() == [1 + N, 0]


def test_latents_are_those_of_a_changed_copy_and_onnx_is_eager(llama):
    _, parts, table = llama
    before = {n: p.clone() for n, p in module("llama").state_dict().items()}
    model = built("llama", **table)
    law_of_the_second_model(model, parts[ALL])
    assert all(torch.equal(p, before[n]) for n, p in module("llama").state_dict().items())
    assert str(model.program.step.graph) == str(built("llama").program.step.graph)
    assert far(prompted(model)[0], prompted(built("llama"))[0]) > 0.05  # it does something
    compiled = built("llama", "onnx", **table)
    for _, other in variants(compiled, None):
        assert far(prompted(other)[0], prompted(model)[0]) < 1e-4
        assert other.facts.prefill.latents == N and {COPROCESS, EMBEDDED} <= set(
            compiled.artifact.entries
        )


@pytest.mark.parametrize("broken", ["places", "order", "first"])
def test_the_law_catches(llama, broken, monkeypatch):
    _, parts, table = llama
    model, extend = built("llama", **table), PromptLatents.extend

    def wrong(self, calls):
        part, backend = type(calls.backend).part, calls.backend

        def changed(_, entry, given):
            if broken == "places":  # of all rows those of the longest
                given["positions"] = np.where(given["positions"] < 0, -1, given["positions"].max(0))
            if broken == "order" and entry == EMBEDDED:
                given["stream"] = given["stream"][:, ::-1]
            if broken == "first":
                given["rows"] = given["rows"] * 0
            return part(backend, entry, given)

        monkeypatch.setattr(type(backend), "part", changed)
        found = extend(self, calls)
        monkeypatch.setattr(type(backend), "part", part)
        return found

    monkeypatch.setattr(PromptLatents, "extend", wrong)
    with pytest.raises(AssertionError):
        law_of_the_second_model(model, parts[ALL])


def test_no_latents_are_the_model(llama):
    table = {**llama[2], "latents": 0, "trained": "missing"}
    model, base = built("llama", **table), built("llama")
    assert model.program.text() == base.program.text()
    assert np.array_equal(prompted(model)[0], prompted(base)[0])


def law_of_insertions(soft, parts):
    """The losses of several insertions at once are those of each alone, and of a session."""
    ids = torch.from_numpy(TOKENS[:2, :45])
    places, table = torch.tensor([4, 9, 24]), {}
    found, without = soft.losses(parts, ids, places)
    for i, place in enumerate(places):
        alone, _ = soft.losses(parts, ids, places[[i]])
        table[int(place)] = found[:, i]
        assert (alone[:, 0] - found[:, i]).abs().max() < 1e-4
    assert (found - without).abs().max() > 0.05
    return table


@pytest.mark.parametrize("which", ["llama", "between"])
def test_an_insertion_does_not_depend_on_others_and_is_what_a_session_does(which, request):
    law_of_sessions(*request.getfixturevalue(which))


def law_of_sessions(soft, parts, table):
    for place, losses in law_of_insertions(soft, parts).items():
        place += soft.method.behind
        with built("llama", **table).session(2) as session:
            out = [session.prompt(TOKENS[:2, :place])]
            out.append(session.run(TOKENS[:2, place : place + AHEAD - 1]))
        logits = torch.from_numpy(np.concatenate(out, axis=1))
        target = torch.from_numpy(TOKENS[:2, place : place + AHEAD])
        want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        assert (losses.flatten() - want).abs().max() < 1e-3


@pytest.mark.parametrize("broken", ["others", "later"])
def test_the_law_of_insertions_catches(llama, broken, monkeypatch):
    real = augment.visible

    def wrong(places, width, length, slots):
        seen, slot = real(places, width, length, slots), torch.arange(slots)
        more = slot >= length if broken == "others" else slot < length
        return seen | more  # what positions hide stays hidden

    monkeypatch.setattr(augment, "visible", wrong)
    soft, parts, table = llama
    with pytest.raises(AssertionError):
        if broken == "others":
            law_of_insertions(soft, parts)
        else:
            law_of_sessions(soft, parts, table)


@pytest.mark.long
def test_training_makes_the_text_likelier_and_leaves_the_model(tmp_path):
    soft, parts = (
        Augmented(
            over_state(capture(module("llama"), max_context=CONTEXT)),
            CacheAugment(latents=N, behind=0),
        ),
        None,
    )
    before = {n: t.clone() for n, t in soft.fixed.items()}
    parts = soft.start(2, 0)
    options = TrainOptions(rate=5e-2, minutes=5.0)
    run = AugmentRun(soft, parts, options, tmp_path / "run")
    ids, known = torch.from_numpy(TOKENS[:1, :45]), torch.ones(1, 44)
    first = run.learn(ids, known)
    for _ in range(240):
        last = run.learn(ids, known)
    assert last["loss"] < 0.9 * last["without"] and last["loss"] < first["loss"]
    assert all(torch.equal(t, before[n]) for n, t in soft.fixed.items())


def test_generation_goes_on_behind_the_latents(llama):
    table = llama[2]
    model = built("llama", **table)
    prompts = [list(row[:n]) for row, n in zip(ROWS, LENGTHS, strict=True)]
    out = model.generate(prompts, 6, eos=[])
    with model.session() as session:  # a loop of one's own, and a row alone
        logits, found = session.prompt(ROWS[1:2, : LENGTHS[1]]), []
        for _ in range(6):
            found.append(int(logits[0, -1].argmax()))
            with session.fork() as other:
                assert far(other.run([[found[-1]]]), session.run([[found[-1]]])) < 1e-6
            session.rewind(session.lengths - 1)
            logits = session.run([[found[-1]]])
    assert out.tokens[1] == found
    long = list(TOKENS.flatten()[: CONTEXT - N - 2])
    assert model.generate([long], 6, eos=[]).stats["finish"] == ["context"]
    assert len(model.generate([long], 6, eos=[]).tokens[0]) == 2
    with model.session() as session, pytest.raises(InputError, match="and 3 latents are more"):
        session.prompt([long + [5, 6, 7]])
    with model.session(2) as session:  # a row without a prompt holds nothing
        session.prompt(ROWS[:2], [9, 0])
        assert session.lengths.tolist() == [9 + N, 0]


@pytest.mark.long
def test_drafts_and_codes_and_files(llama, tmp_path):
    table = llama[2]
    tables = {"prefill.prune": table, "draft": {"use": "prompt-lookup"}}
    prompt = [list(np.tile(ROWS[0, :9], 4))]
    with accel.optimize(module("llama"), tables, max_context=CONTEXT) as model:
        want = built("llama", **table).generate(prompt, 12, eos=[]).tokens
        assert model.generate(prompt, 12, eos=[]).tokens == want
    tables = {"kv.codec": {"use": "kv-int8"}, "prefill.prune": table}
    coded, eager = (built("llama", target, tables) for target in ("onnx", "eager"))
    assert (
        far(prompted(coded, ROWS[:1], LENGTHS[:1])[0], prompted(eager, ROWS[:1], LENGTHS[:1])[0])
        < 1e-2
    )
    model = built("llama", "onnx", **table)
    with model.session() as session:
        session.prompt(ROWS[:1])
        session.save(tmp_path / "kept")
        with model.open_session(tmp_path / "kept") as again:
            assert far(again.run([[7]]), session.run([[7]])) < 1e-6


@pytest.mark.long
def test_explain_counts_the_latents(llama):
    tables, count = (
        {"prefill.prune": llama[2]},
        STEP - 2,
    )  # tokens, so that the latents need another buffer
    found = partial(
        accel.optimize, module("llama"), max_context=2 * STEP, target="eager", verify=False
    )
    tokens = np.random.default_rng(0).integers(3, 50, (1, count))
    sizes = []
    for asked in (tables, {}):
        with found(asked) as model, model.session() as session:
            session.prompt(tokens)
            methods = assemble(Recipe(tables=asked)).methods
            told = costs.cache(model.program, None, methods, (count,), 0)
            assert told.bytes(count) == session.stats["kv_bytes"]
            sizes.append(told.bytes(count))
    assert sizes[0] == 2 * sizes[1]


def test_what_cannot_be_extended_is_refused(llama, tmp_path):
    soft, parts, table = llama
    with pytest.raises(RecipeError, match="cache-augment: latents is -1"):
        assemble(Recipe(tables={"prefill.prune": {"use": "cache-augment", "latents": -1}}))
    with pytest.raises(PassError, match="latents is 5, but it was trained with 3; set latents = 3"):
        built("llama", **{**table, "latents": 5})
    with pytest.raises(PassError, match="the bundled file was trained for another model"):
        built("llama", **{**table, "trained": ""})
    short = {n: t for n, t in parts[ALL].items() if "layers.2" not in n}
    write(soft.method, tmp_path / "short", {ALL: short}, soft.names, {})
    with pytest.raises(PassError, match=r"has all\.model\.layers\.2\..* of size"):
        built("llama", **{**table, "trained": str(tmp_path / "short")})
    for axis, use in (("kv.score", "snapkv"), ("kv.select", "quest"), ("kv.codec", "kivi")):
        tables = {axis: {"use": use}, "prefill.prune": table}
        with pytest.raises(RecipeError, match="prefill.prune = cache-augment"):
            assemble(Recipe(tables=tables))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "why"),
    [(lambda: small_model("mamba"), "recurrent state is replaced"), (gemma3n, r"in \d+ ways")],
    ids=["mamba", "gemma3n"],
)
def test_models_that_cannot_be_extended(llama, model, why):
    with pytest.raises(PassError, match=f"cache-augment: .*{why}"):
        accel.optimize(model(), {"prefill.prune": llama[2]}, max_context=64, target="eager")


@pytest.mark.long
def test_what_it_breaks_fails_and_all_else_holds(llama):
    """Latents lie where a prompt ends, so keys go by how it was cut; see below."""
    wanted = TRIALS.keys() - CacheAugment.breaks - PROVIDED - {Invariant.CALL_INDEPENDENT}
    for behind in (0, 2):
        model = built("llama", **{**llama[2], "behind": behind})
        assert {what for what, trial in TRIALS.items() if holds(trial, model)} == wanted


def test_what_relies_on_how_a_prompt_is_cut_is_refused_beside_it():
    """It relies on that itself, so it cannot say that it breaks it; what else relies on it is refused for another
    reason.
    """
    tables, found = {"prefill.prune": {"use": "cache-augment"}}, 0
    for axis_name, axis in find_axes().items():
        for name in axis.names():
            relies = axis.method(name).relies
            if isinstance(relies, property) or axis_name == "prefill.prune":
                continue
            if Invariant.CALL_INDEPENDENT in relies:
                with pytest.raises(RecipeError, match="relies on|conflict"):
                    assemble(Recipe(tables={**tables, axis_name: {"use": name}}))
                found += 1
    assert found > 3
