"""Adapters that a session chooses: each row computes what the model merged with its adapter does."""

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import ArtifactError, InputError, PassError, SavedSessionError
from accel.ir.peft import read_adapter
from accel.passes.depth.layer_taylor import LayerTaylor
from accel.passes.depth.shortgpt import ShortGPT
from accel.passes.depth.sleb import Sleb
from accel.passes.numerics.batch_invariant import BatchInvariant
from accel.runtime.artifact.artifact import digest
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.model.adapters import Adapters
from accel.runtime.serve.engine import Engine
from accel.runtime.serve.request import Request
from accel.runtime.session.prompt.pieces import PieceReuse
from accel.runtime.session.prompt.prefix_cache import PrefixCache

from . import adapter_case as case
from .once import made_once
from .session_ways import near

TOKENS = np.random.default_rng(0).integers(0, 90, (3, 40))
ROWS = ["two", None, "one"]
CLOSE = 1e-4  # of the largest logit
close = partial(near, bound=CLOSE)
SIZES = {"max_context": 64, "max_batch": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of two layers; two adapters of different ranks, modules and scales; logits of each merged model."""
    model, folder = models.make("llama", 2), tmp_path_factory.mktemp("adapters")
    one = case.write(folder / "one", model, ["q_proj", "v_proj", "down_proj"], rank=3, alpha=5)
    two = case.write(folder / "two", model, ["q_proj", "o_proj", "up_proj"], 5, 4, seed=1)
    merged = {
        None: model,
        "one": case.merged(model, one, 5 / 3),
        "two": case.merged(model, two, 4 / 5),
    }
    want = {name: case.logits(module, TOKENS) for name, module in merged.items()}
    return SimpleNamespace(model=model, folders={"one": one, "two": two}, merged=merged, want=want)


@pytest.fixture(scope="module")
def built(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "artifact"
    with accel.optimize(trained.model, adapters=trained.folders, out=out, **SIZES) as compiled:
        yield compiled


@pytest.fixture(scope="module")
def in_process(trained):
    """in_process(target): a build that writes no artifact, made once."""

    def get(target):
        options = {"target": target, "verify": False, "adapters": trained.folders}
        return accel.optimize(trained.model, **options, **SIZES)

    with made_once(get) as found:
        yield found


def greedy(module, tokens, count):
    """The tokens that a module continues with."""
    row = list(tokens)
    for _ in range(count):
        row.append(int(case.logits(module, [row])[0, -1].argmax()))
    return row[len(tokens) :]


# The law


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [None, "one", "two"])
def test_a_session_computes_what_the_merged_model_does(trained, built, name):
    close(built.logits(TOKENS, adapter=name), trained.want[name])
    prompt = TOKENS[0, :9]
    assert built.generate(prompt, 6, adapter=name, eos=[]).tokens == [
        greedy(trained.merged[name], prompt, 6)
    ]


def test_the_law_tells_a_wrong_scale(trained, built):
    """A negative control: an adapter of four fifths of the strength is another model."""
    wrong = case.logits(case.merged(trained.model, trained.folders["one"], 4 / 3), TOKENS)
    assert np.abs(built.logits(TOKENS, adapter="one") - wrong).max() > 100 * CLOSE * wrong.max()


def test_rows_of_a_batch_use_different_adapters(trained, built):
    want = np.stack([trained.want[name][row] for row, name in enumerate(ROWS)])
    close(built.logits(TOKENS, adapter=ROWS), want)
    prompts = [TOKENS[row, : 5 + row] for row in range(3)]
    expected = [
        greedy(trained.merged[name], prompt, 5) for name, prompt in zip(ROWS, prompts, strict=True)
    ]
    assert built.generate(prompts, 5, adapter=ROWS, eos=[]).tokens == expected
    with pytest.raises(AssertionError):  # the rows do differ
        close(built.logits(TOKENS, adapter=ROWS[::-1]), want)


def test_rows_keep_their_adapters_when_they_move(trained, built):
    """Decoding steps, a change of order, fewer rows, and a fork."""
    with built.session(3, adapter=ROWS) as session:
        session.run(TOKENS[:, :10])
        session.select([2, 1, 0])
        names, rows = ROWS[::-1], TOKENS[::-1]
        for at in range(10, 13):
            got = session.run(rows[:, at : at + 1])
            close(got[:, 0], np.stack([trained.want[n][2 - i, at] for i, n in enumerate(names)]))
        with session.fork() as other:
            other.select([0, 0])
            got = other.run(np.stack([rows[0, 13:14]] * 2))
            close(got[:, 0], np.stack([trained.want["one"][2, 13]] * 2))
        got = session.run(rows[:, 13:14])
        close(got[:, 0], np.stack([trained.want[n][2 - i, 13] for i, n in enumerate(names)]))


@pytest.mark.parametrize("target", ["eager", pytest.param("triton", marks=pytest.mark.long)])
def test_other_targets_obey_it(trained, in_process, target):
    compiled = in_process(target)
    want = np.stack([trained.want[name][row, :6] for row, name in enumerate(ROWS)])
    close(compiled.logits(TOKENS[:, :6], adapter=ROWS), want)
    close(compiled.logits(TOKENS[:, :6]), trained.want[None][:, :6])
    with compiled.session(3, adapter=ROWS) as session:
        session.run(TOKENS[:, :4])
        session.select([0, 1, 2])
        close(session.run(TOKENS[:, 4:5])[:, 0], want[:, 4])
        session.select([0, 0])
        close(session.run(TOKENS[[0, 0], 5:6])[:, 0], want[[0, 0], 5])


def test_what_peft_computes_is_what_a_session_does(trained, built):
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(
        case.merged(trained.model, trained.folders["one"], 0), trained.folders["one"], "one"
    )
    theirs.load_adapter(trained.folders["two"], "two")
    for name in ("one", "two"):
        theirs.set_adapter(name)
        close(built.logits(TOKENS, adapter=name), case.logits(theirs, TOKENS))


# With the rest of the compiler


def test_a_loaded_artifact_holds_them_and_needs_no_torch(trained, built, tmp_path):
    built.save(tmp_path / "copy")
    np.save(tmp_path / "want.npy", trained.want["two"])
    np.save(tmp_path / "tokens.npy", TOKENS)
    code = f"""
import sys, numpy as np, accel
with accel.load({str(tmp_path / "copy")!r}, threads=1) as model:
    assert model.adapters == ["one", "two"]
    got = model.logits(np.load({str(tmp_path / "tokens.npy")!r}), adapter="two")
    want = np.load({str(tmp_path / "want.npy")!r})
    assert abs(got - want).max() < 1e-3, abs(got - want).max()
assert "torch" not in sys.modules and "peft" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_int4_weights_stay_quantised_and_adapters_do_not(trained, built):
    """What an adapter adds to the logits of a 4-bit model is what it adds to those of the float one, about."""
    with accel.optimize(trained.model, "int4-awq", adapters=trained.folders, **SIZES) as compiled:
        found = {name: compiled.logits(TOKENS, adapter=name) for name in trained.want}
        mixed = compiled.logits(TOKENS, adapter=ROWS)
    for row, name in enumerate(ROWS):
        close(mixed[row], found[name][row])
        error = np.abs(found[name] - trained.want[name]).mean()
        for other in set(trained.want) - {name}:
            assert error < np.abs(found[name] - trained.want[other]).mean() / 2


@pytest.mark.parametrize(
    "recipe",
    [
        "prompt-lookup",
        *(pytest.param(r, marks=pytest.mark.long) for r in ("token-recycling", "layerskip")),
    ],
)
def test_drafts_are_verified_by_the_rows_adapter(trained, recipe):
    prompts = [np.tile(TOKENS[row, :4], 5) for row in range(2)]
    options = {"target": "eager", "verify": False, "adapters": trained.folders}
    with accel.optimize(trained.model, recipe, **options, **SIZES) as compiled:
        got = compiled.generate(prompts, 10, adapter=["one", "two"], eos=[]).tokens
    expected = [
        greedy(trained.merged[name], prompt, 10)
        for name, prompt in zip(("one", "two"), prompts, strict=True)
    ]
    assert got == expected


def test_no_adapter_reads_the_cached_prefix_of_another(trained, monkeypatch):
    recipe = {"kv.reuse": {"use": "paged-prefix", "block": 4}}
    options = {"adapters": trained.folders, "verify": False, "target": "eager", **SIZES}

    def run(compiled, row):
        """The largest error, and the tokens that were reused, of sessions that begin with the same tokens."""
        worst, reused = 0.0, []
        for name in ("one", "two", None, "one"):
            with compiled.session(1, adapter=name) as session:
                got = session.run(TOKENS[row : row + 1, :14], last_only=True)
                session.end_prompt()
                reused.append(session.stats["reused"])
            worst = max(worst, np.abs(got[0, 0] - trained.want[name][row, 13]).max())
        return worst, reused

    with accel.optimize(trained.model, recipe, **options) as compiled:
        worst, reused = run(compiled, 0)
        assert worst < 1e-3 and reused == [0, 0, 0, 12]
        monkeypatch.setattr(PrefixCache, "adapted", lambda *_: None)  # a negative control
        worst, reused = run(compiled, 1)
        assert worst > 0.1 and reused == [0, 12, 12, 12]


def test_parts_of_prompts_are_found_by_the_same_adapter_alone(trained, monkeypatch):
    """With ratio 1, so that they give the logits of recomputing, in two calls instead of one."""
    recipe = {"kv.reuse": {"use": "cacheblend", "least": 4, "ratio": 1.0}}
    options = {"adapters": trained.folders, "verify": False, "target": "eager", **SIZES}

    def run(compiled, row):
        calls = []
        for start, name in ((3, "one"), (0, "one"), (0, "two"), (0, None)):
            with compiled.session(1, adapter=name) as session:
                got = session.prompt(TOKENS[row : row + 1, start:14])
                calls.append(session.stats["calls"])
            assert start or np.abs(got[0, 0] - trained.want[name][row, 13]).max() < 1e-3
        return calls

    with accel.optimize(trained.model, recipe, **options) as compiled:
        assert run(compiled, 0) == [1, 2, 1, 1]
        monkeypatch.setattr(PieceReuse, "adapted", lambda *_: None)  # a negative control
        with pytest.raises(AssertionError):
            run(compiled, 1)


def test_an_adapter_is_added_to_a_model_that_runs(trained, in_process, tmp_path):
    late = case.write(tmp_path / "late", trained.model, ["up_proj"], rank=2, alpha=3, seed=9)
    want = case.logits(case.merged(trained.model, late, 3 / 2), TOKENS)
    compiled = in_process("eager")
    compiled.load_adapter("late", late)
    assert compiled.adapters == ["late", "one", "two"]
    close(compiled.logits(TOKENS, adapter="late"), want)
    with compiled.session(3, adapter="late") as session:
        compiled.load_adapter("late", trained.folders["two"])
        close(session.run(TOKENS), want)  # a session keeps what it opened with
    close(compiled.logits(TOKENS, adapter="late"), trained.want["two"])
    other = case.write(tmp_path / "other", trained.model, ["k_proj"])
    with pytest.raises(
        InputError, match="adapts model.layers.[01].self_attn.k_proj, .*takes adapters of 10"
    ):
        compiled.load_adapter("other", other)


def test_rows_join_where_adapters_lie_in_one_order(trained, built):
    """A row chooses by the places of its session's adapters, which stay when rows leave or change places."""
    for names, left in ((["one", "two"], [1, 0]), (["two", "one"], [1])):
        with built.session(2, adapter=names) as session, built.session(adapter="one") as other:
            session.run(TOKENS[:2, :10])
            session.select(left)
            other.run(TOKENS[2:, :10])
            with pytest.raises(InputError, match=f"opened with adapters .{names[0]!r}.*same order"):
                session.join(other)
            last = session.run(TOKENS[left, 10:11])[-1, 0]
            close(last, trained.want[names[left[-1]]][left[-1], 10])
            close(other.run(TOKENS[2:, 10:11])[0, 0], trained.want["one"][2, 10])
    with built.session(adapter="one") as session, built.session(adapter="one") as other:
        for row, one in enumerate((session, other)):
            one.run(TOKENS[[row], :10])
        session.join(other)
        close(session.run(TOKENS[:2, 10:11])[:, 0], trained.want["one"][:2, 10])


def test_a_session_of_an_adapter_that_was_replaced_is_of_no_other(trained, built, tmp_path):
    with accel.load(built.artifact.path) as model, model.session(adapter="one") as session:
        session.run(TOKENS[:1, :10])
        model.load_adapter("one", trained.folders["two"])
        with model.session(adapter="one") as other:
            other.run(TOKENS[1:2, :10])
            with pytest.raises(InputError, match="one of which was replaced between"):
                session.join(other)
        session.save(tmp_path / "one.session")
        with pytest.raises(SavedSessionError, match="is of another adapter 'one'"):
            model.open_session(tmp_path / "one.session")
    with built.open_session(tmp_path / "one.session") as opened:
        close(opened.run(TOKENS[:1, 10:11])[0, 0], trained.want["one"][0, 10])


def test_an_engine_serves_an_adapter_that_was_replaced_beside_the_one_before(trained, built):
    def taken(ticket):
        return [event.token for event in ticket]

    with accel.load(built.artifact.path) as model:
        want = [
            model.generate([TOKENS[0, :10]], 12, adapter=name, eos=[]).tokens[0]
            for name in ("one", "two")
        ]
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        with Engine(model) as engine:
            first = engine.submit(Request(TOKENS[0, :10], params, adapter="one"))
            begun = next(iter(first)).token
            model.load_adapter("one", trained.folders["two"])
            second = engine.submit(Request(TOKENS[0, :10], params, adapter="one"))
            assert [[begun, *taken(first)], taken(second)] == want
    assert want[0] != want[1]


def test_a_request_keeps_its_adapter_while_it_waits_and_runs_again(trained, built):
    """Whatever has its name by then, or nothing."""
    want = [
        built.generate([TOKENS[0, :10]], 12, adapter=name, eos=[]).tokens[0]
        for name in ("one", "two")
    ]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    request = Request(TOKENS[0, :10], params, adapter="late")
    with accel.load(built.artifact.path) as model:
        model.load_adapter("late", trained.folders["one"])
        with Engine(model, max_batch=1) as engine:
            tickets = [engine.submit(request) for _ in range(3)]  # two wait
            model.load_adapter("late", trained.folders["two"])
            tickets.append(engine.submit(request))
            model.unload_adapter("late")
            with pytest.raises(InputError, match="late"):
                engine.submit(request)
            found = [[event.token for event in ticket] for ticket in tickets]
        assert found == [want[0]] * 3 + [want[1]] and model.adapters == ["one", "two"]
        for name, words in (("one", "the artifact's own"), ("late", "'late' does not exist")):
            with pytest.raises(InputError, match=words):
                model.unload_adapter(name)
        model.load_adapter("late", trained.folders["one"])
        with pytest.raises(InputError, match="did you mean 'late'"):
            model.unload_adapter("lat")


@pytest.mark.long
def test_a_merged_adapter_goes_with_others(trained):
    """Merged first, then chosen: the deltas add up."""
    both = case.merged(trained.merged["one"], trained.folders["two"], 4 / 5)
    options = {"merge_adapter": trained.folders["one"], "adapters": {"two": trained.folders["two"]}}
    with accel.optimize(
        trained.model, target="eager", verify=False, **options, **SIZES
    ) as compiled:
        close(compiled.logits(TOKENS), trained.want["one"])
        close(compiled.logits(TOKENS, adapter="two"), case.logits(both, TOKENS))


def test_the_report_and_the_manifest_say_what_there_is(trained, built):
    facts = built.report["model"]["adapters"]
    assert facts["ranks"] == {"one": 3, "two": 5}
    assert facts["bytes"]["one"] == 2 * 4 * 3 * (48 + 40 + 48 + 20 + 76 + 48)
    assert len(facts["modules"]) == 2 * 5
    assert "adapters/one.safetensors" in built.report["bytes"]


# Refusals


@pytest.mark.parametrize(
    "adapter, words",
    [
        ("tow", "adapter 'tow' does not exist; did you mean 'two'?"),
        (["one", "two"], "2 adapters for 3 rows"),
        (7, "adapter is 7; give the name"),
    ],
)
def test_what_is_no_adapter(built, adapter, words):
    for call in (built.logits, lambda t, **o: built.generate(list(t), 2, **o)):
        with pytest.raises(InputError, match=words):
            call(TOKENS, adapter=adapter)


def test_a_model_without_adapters_takes_none(build):
    with pytest.raises(InputError, match="takes no adapters; build it with them"):
        build("llama").compiled.session(adapter="one")
    with pytest.raises(InputError, match="takes no adapters"):
        build("llama").compiled.load_adapter("one", "nowhere")


def kinds(model):
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    plain = {f"{q}A.weight": torch.ones(2, 48), f"{q}B.weight": torch.ones(40, 2)}
    embedding = "base_model.model.model.embed_tokens.lora_embedding_"
    head = "base_model.model.lm_head.lora_"
    return {
        "is of DoRA": {**plain, f"{q}magnitude_vector": torch.ones(40)},
        "is of an embedding": {f"{embedding}A": torch.ones(2, 101), f"{embedding}B": torch.ones(48, 2)},
        "replaces model.norm.weight": {**plain, "base_model.model.model.norm.weight": torch.ones(48)},
        "lm_head is the output head": {
            f"{head}A.weight": torch.ones(2, 48), f"{head}B.weight": torch.ones(101, 2)
        },
        "is for a weight .40, 47.": {**plain, f"{q}A.weight": torch.ones(2, 47)},
        "is no product with a stored weight": {k.replace("q_proj", "x"): v for k, v in plain.items()},
    }  # fmt: skip


@pytest.mark.parametrize("words", kinds(None))
def test_what_a_session_cannot_choose(trained, tmp_path, words):
    folder = case.written(tmp_path, kinds(trained.model)[words], r=2)
    with pytest.raises((InputError, PassError), match=words) as error:
        accel.optimize(trained.model, adapters={"a": folder}, target="eager", verify=False)
    assert "merge" in str(error.value) or "another base model" in str(error.value)


def test_batch_invariant_builds_take_no_adapters(built):
    with pytest.raises(PassError, match="batch-invariant: the products with adapters"):
        BatchInvariant().run(built.program)


@pytest.mark.parametrize("method", [ShortGPT(), Sleb(), LayerTaylor()])
def test_deleted_layers_have_no_adapters(built, method):
    with pytest.raises(PassError, match=f"{method.use}: it deletes layers, of which adapters"):
        method.run(built.program)


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", None, 3])
def test_names_are_plain(trained, built, name):
    with pytest.raises(InputError, match="give letters, digits"):
        built.load_adapter(name, trained.folders["one"])


def test_a_damaged_artifact_is_named(built, tmp_path):
    built.save(tmp_path / "a")
    manifest = tmp_path / "a" / "accel.json"
    raw = json.loads(manifest.read_text())
    raw["model"]["adapters"]["ranks"]["three"] = 4
    raw["model"]["adapters"]["bytes"]["three"] = 4
    manifest.write_text(json.dumps({**raw, "digest": digest(raw)}))
    with pytest.raises(
        ArtifactError, match="three: file 'adapters/three.safetensors' does not exist"
    ):
        accel.load(tmp_path / "a")
    del raw["model"]["adapters"]["ranks"]["three"]
    raw["model"]["adapters"]["modules"]["model.layers.0.self_attn.q_proj"] = [48, 41]
    manifest.write_text(json.dumps({**raw, "digest": digest(raw)}))
    with pytest.raises(ArtifactError, match=r"disagree on lora.model.layers.0.self_attn.q_proj.b"):
        accel.load(tmp_path / "a")


def test_adapters_are_laid_side_by_side_for_rows(trained, built):
    """Once each, whatever the number of rows; modules that one does not adapt get zeros."""
    held = Adapters(built.facts.adapters)
    for name in ("one", "two"):
        held.add(name, read_adapter(trained.folders[name]))
    used = held.chosen(["two", None, "one", "two"])
    assert used.numbers == (2, 0, 1, 2) and used.rows.shape == (4, 1, 8)
    assert used.rows[:, 0].tolist() == [
        [1] * 5 + [0] * 3,
        [0] * 8,
        [0] * 5 + [1] * 3,
        [1] * 5 + [0] * 3,
    ]
    a = used.arrays["lora.model.layers.0.self_attn.v_proj.a"]
    assert a.shape == (48, 8) and not a[:, :5].any() and a[:, 5:].all()


def test_a_saved_session_keeps_its_rows_adapters(trained, built, tmp_path):
    """Also in another order; of another adapter that took the name, it is refused."""
    path = tmp_path / "one.session"
    with built.session(3, adapter=ROWS) as session:
        session.run(TOKENS[:, :20])
        session.select([1, 2, 0])
        session.save(path)
        want = session.run(TOKENS[:, 20:23])
    with built.open_session(path) as opened:
        assert np.array_equal(opened.run(TOKENS[:, 20:23]), want)
    with accel.load(built.artifact.path) as other:
        other.load_adapter("one", trained.folders["two"])
        with pytest.raises(
            SavedSessionError, match="is of another adapter 'one' than this model has"
        ):
            other.open_session(path)
