"""draft = s3d (arXiv:2405.20314): what one call of the newest token and masks says, by transformers' own layers; tokens
as plain decoding; a cache that drafts leave as it was.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import s3d as training
from accel.compiler.train.runs.s3d import Masked, MaskedRun
from accel.ir.capture.capture import capture
from accel.ir.depth import NESTED, PROPAGATE, Depth
from accel.ir.errors import InputError, PassError, RecipeError
from accel.passes.state.extra_ids import ROWS
from accel.passes.state.masks import DOWN, LAYERS, UP, Shortcut
from accel.passes.trained import ALL, first_product, write
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.s3d import S3d
from accel.runtime.length.fixed import Fixed
from accel.runtime.prompt.pause import Pause
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.sample_match import SampleMatch

from ...draft_case import plain, rows_of, speculated
from ...prefill_case import CONTEXT, TOKENS, built, far, module
from ...s3d_case import part_of, tables

NAME, PROMPTS = "llama:4", TOKENS[:2, :9]


@pytest.fixture(scope="module")
def model():
    return built(NAME, tables=tables(NAME))


@torch.no_grad()
def oracle(prompt, last, tensors, masks, runs, shortcut=True):
    """What masks say behind a prompt [T] and a token, by transformers' own layers: logits [1+N,V]. Layers that are left
    out are so for the draft's rows alone; the prompt went through all.
    """
    whole = module(NAME).model
    table, begin = whole.embed_tokens, len(prompt)
    rows = tensors[ROWS][:masks]
    x = torch.cat([table(torch.tensor([*prompt, last])), rows])[None]
    places = torch.arange(x.shape[1])[None]
    turn = whole.rotary_emb(x, places)
    mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    gone = False
    for layer, run in zip(whole.layers, runs, strict=True):
        out = layer(x, attention_mask=mask, position_ids=places, position_embeddings=turn)
        out = out if isinstance(out, torch.Tensor) else out[0]
        if not run and not gone and shortcut:
            late = x[:, begin:]
            unit = late / (late.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            late = late + unit @ tensors[DOWN] @ tensors[UP]
            x, gone = torch.cat([x[:, :begin], late], 1), True
        x = torch.cat([out[:, :begin], out[:, begin:] if run else x[:, begin:]], 1)
    return module(NAME).lm_head(whole.norm(x))[0, begin:].numpy()


def opened(model, method, prompts, sampler=None):
    session, rows = model.session(len(prompts)), rows_of(prompts, sampler or Standard())
    methods = {"tree": Chain(), "verify": SampleMatch(), "length": Fixed(9)}
    drafters = method.open(session, rows, DecodeContext(methods, None, model))
    lines = session.prompt(prompts)
    for row, line in zip(rows, lines, strict=True):
        row.accept(int(line[0].argmax()), None)
    return session, rows, drafters


def law(model, tensors, runs, method=None, shortcut=True):
    session, rows, drafters = opened(model, method or S3d(), PROMPTS)
    with session:
        trees = drafters.draft({0: 5, 1: 3}, Fixed(9).open(rows, unmeasured_cost))
        for i, size in ((0, 5), (1, 3)):
            want = oracle(PROMPTS[i], rows[i].seen[-1], tensors, size - 1, runs, shortcut)
            assert far(drafters._said[i, :size], want) < 1e-4
            assert trees[i].tokens.tolist() == want.argmax(1).tolist()


def test_drafts_are_what_the_layers_say_of_masks(model):
    tensors = part_of(NAME)[1]
    law(model, tensors, [True, False, False, True])
    few = built(NAME, tables=tables(NAME, first=2, last=1))
    law(few, tensors, [True, True, False, True], S3d(first=2, last=1))


@pytest.mark.parametrize("wrong", ["rows", "order", "layers", "shortcut", "place"])
def test_the_law_catches(model, wrong, monkeypatch):
    tensors, runs = dict(part_of(NAME)[1]), [True, False, False, True]
    if wrong == "rows":
        tensors[ROWS] = tensors[ROWS] * 1.1
    elif wrong == "order":
        tensors[ROWS] = tensors[ROWS].flip(0)
    elif wrong == "layers":
        runs = [True, True, False, True]
    elif wrong == "place":
        tensors[DOWN] = tensors[DOWN].flip(0)
    with pytest.raises(AssertionError):
        law(model, tensors, runs, shortcut=wrong != "shortcut")


def drafted(model, method, sampler):
    rows = rows_of(PROMPTS, sampler)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    with model.session(2) as session:
        more = {"length": Fixed(5), "model": model}
        list(speculated(session, rows, method, "sample-match", **more))
    return [row.tokens for row in rows], sum((row.drafting for row in rows), Counter())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding(model, temperature):
    sampler = Standard(temperature=temperature)
    rows = rows_of(PROMPTS, sampler)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    want = plain(built(NAME).session(2), rows)
    found, counts = drafted(model, S3d(), sampler)
    assert found == want and counts["drafted"] > 0


def test_generate_drafts_whole_requests(model):
    prompts = [TOKENS[0, :20], TOKENS[1, :5]]
    want = built(NAME).generate(prompts, 12, eos=[]).tokens
    assert model.generate(prompts, 12, eos=[]).tokens == want
    pauses = {"prompt": {"use": "pause", "trained": _pause(), "pauses": 2}}
    want = built(NAME, tables=pauses).generate(prompts, 12, eos=[]).tokens
    both = built(NAME, tables={**tables(NAME), **pauses})
    assert both.generate(prompts, 12, eos=[]).tokens == want
    size = both.facts.vocab_size
    assert both.facts.token_ids == size + 5
    _, _, drafters = opened(both, S3d(), PROMPTS)
    assert drafters._masks.tolist() == list(range(size + 1, size + 5)), "behind the pause"


def _pause():
    """The file of a pause for the model."""
    program = built(NAME).program
    file = part_of(NAME)[0].replace(".safetensors", "-pause.safetensors")
    rows = torch.ones(1, module(NAME).get_input_embeddings().weight.shape[1])
    write(Pause(), Path(file), {ALL: {ROWS: rows}}, first_product(program, program.step), {})
    return file


@pytest.mark.long
def test_artifacts_of_four_bits_give_their_own_tokens():
    four = {"weights": {"use": "int4"}}
    prompts = [TOKENS[0, :20], TOKENS[1, :5]]
    want = built(NAME, "onnx", four).generate(prompts, 12, eos=[]).tokens
    model = built(NAME, "onnx", {**four, **tables(NAME)})
    assert model.generate(prompts, 12, eos=[]).tokens == want
    found, counts = drafted(model, S3d(), Standard())
    assert counts["drafted"] > 0


def test_all_layers_without_masks_are_always_right(model):
    """One token of a call by all layers is the model's own; with masks the first of each draft is."""
    everything = S3d(first=4, masks=0)
    whole = built(
        NAME, tables={"draft": {"use": "s3d", "first": 4, "masks": 0}, "depth": {"use": "by-call"}}
    )
    assert whole.facts.extra_ids is None, "it needs no part"
    found, counts = drafted(whole, everything, Standard())
    assert counts["accepted"] == counts["drafted"] > 0
    masked = built(NAME, tables=tables(NAME, first=4))
    session, rows, drafters = opened(masked, S3d(first=4), PROMPTS)
    with session:
        for _ in range(4):
            trees = drafters.draft({0: 5, 1: 5}, Fixed(9).open(rows, unmeasured_cost))
            own = session.run(np.array([[row.seen[-1]] for row in rows]))[:, 0].argmax(1)
            assert [tree.tokens[0] for tree in trees.values()] == own.tolist()
            for row, token in zip(rows, own, strict=True):
                row.accept(int(token), None)
    _, some = drafted(model, S3d(masks=0), Standard())
    assert some["accepted"] < some["drafted"], "the control: half of the layers"


def values(session):
    return {n: v.clone() for n, v in session._core.backend._state.items()}


def test_layers_that_are_left_out_are_neither_read_nor_written(model):
    session, rows, drafters = opened(model, S3d(), PROMPTS)
    more = Fixed(9).open(rows, unmeasured_cost)
    middle = {f"kv.{i}.{what}" for i in (1, 2) for what in "kv"}
    ends = {f"kv.{i}.{what}" for i in (0, 3) for what in "kv"}
    with session:
        before = values(session)
        first = drafters.draft({0: 5, 1: 5}, more)
        said = drafters._said.copy()
        state = session._core.backend._state
        changed = {n for n, v in before.items() if not torch.equal(v, state[n])}
        assert ends <= changed and not middle & changed
        length = PROMPTS.shape[1]
        for name in ends:  # what is held stays, bit for bit
            assert torch.equal(before[name][:, :, :length], state[name][:, :, :length])
        for names, same in ((middle, True), (ends, False)):
            for name in names:
                session._core.backend._state[name].mul_(1.5)
            drafters.draft({0: 5, 1: 5}, more)
            assert np.array_equal(drafters._said, said) == same
        assert first


def test_rows_draft_as_alone(model):
    both = opened(model, S3d(), PROMPTS)
    paces = Fixed(9).open(both[1], unmeasured_cost)
    trees = both[2].draft({0: 2, 1: 5}, paces)
    for i, size in ((0, 2), (1, 5)):
        session, rows, drafters = opened(model, S3d(), PROMPTS[i : i + 1])
        with session:
            alone = drafters.draft({0: size}, Fixed(9).open(rows, unmeasured_cost))
        assert alone[0].tokens.tolist() == trees[i].tokens.tolist() and len(alone[0]) == size
    long = both[2].draft({1: 60}, paces)
    assert len(long[1]) == 5 and set(long) == {1}, "a token of each mask, and one"


def test_a_part_of_another_kind_is_refused(tmp_path):
    file, tensors = part_of(NAME)
    by_call = {"depth": {"use": "by-call"}}

    def build(name=NAME, **options):
        return built(name, tables={"draft": {"use": "s3d", "trained": file, **options}, **by_call})

    with pytest.raises(PassError, match="accel-compile train s3d MODEL"):
        built(NAME, tables={"draft": {"use": "s3d"}, **by_call})
    with pytest.raises(PassError, match="trained for another model.*accel-compile train s3d MODEL"):
        build("qwen2:4")
    with pytest.raises(PassError, match="masks = 6, but the part has 4.*accel-compile train"):
        build(masks=6)
    with pytest.raises(PassError, match="layers 0, 1, 3, but the part was trained for layers 0, 3"):
        build(first=2, last=1)
    with pytest.raises(PassError, match="does not exist"):
        build(trained=str(tmp_path / "none"))
    for depth in (None, Depth((True, False, True, True), NESTED), Depth((True,) * 4, PROPAGATE)):
        facts = SimpleNamespace(layers=[None] * 4, depth=depth)
        with pytest.raises(PassError, match="draft.s3d: .*build with depth = by-call"):
            Shortcut(S3d(), {}).run(SimpleNamespace(facts=facts))
    narrow, program = tmp_path / "narrow.safetensors", built(NAME).program
    short = {**tensors, UP: tensors[UP][:, 1:]}
    write(S3d(), narrow, {ALL: short}, first_product(program, program.step), {})
    with pytest.raises(PassError, match="all.up of size"):
        build(trained=str(narrow))
    fewer = build(masks=2)
    assert fewer.facts.extra_ids.count == 2, "a part serves as many masks as it has, or fewer"


def test_bad_input(model):
    with pytest.raises(RecipeError, match="masks is -1"):
        S3d(masks=-1)
    with pytest.raises(InputError, match="first = 3 and last = 2, but the model has 4 layers"):
        S3d(first=3, last=2).of_layers(4)
    with pytest.raises(InputError, match="s3d needs a model .* depth = by-call"):
        S3d().layers(DecodeContext(model=None))
    by_call = built(NAME, tables={"depth": {"use": "by-call"}})
    with pytest.raises(InputError, match="4 masks, which this model was not built with"):
        opened(by_call, S3d(), PROMPTS)
    size = model.facts.vocab_size
    assert model.logits(TOKENS).shape[2] == size, "no mask follows"
    assert np.array_equal(model.logits(TOKENS), built(NAME).logits(TOKENS))
    with model.session() as session, pytest.raises(InputError, match=str(size + 4)):
        session.run([[size + 4]])


def test_training_is_of_the_part_alone_and_its_logits_are_those_of_drafts(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "CUTS", 3)
    method = S3d()
    soft = Masked(over_state(capture(module(NAME), max_context=CONTEXT)), method)
    tensors, ids = part_of(NAME)[1], torch.from_numpy(TOKENS[:2, :25])
    cuts = torch.tensor([[9, 4], [12, 6]])
    got = soft.logits(tensors, ids, cuts).detach().numpy()
    for b in range(2):
        for k, cut in enumerate(cuts[b].tolist()):
            row = ids[b].tolist()
            want = oracle(row[:cut], row[cut], tensors, 4, [True, False, False, True])
            assert far(got[b, k], want) < 1e-4
    parts, before = soft.start(4, 0), {n: t.clone() for n, t in soft.fixed.items()}
    run = MaskedRun(soft, parts, TrainOptions(rate=0.05), file=None)
    losses = [run.learn(ids, torch.ones(2, 24))["loss"] for _ in range(25)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02
    assert all(torch.equal(t, before[n]) for n, t in soft.fixed.items())
    run.write(tmp_path / "part.safetensors", {}, {"first": 0, "last": 0, "masks": 4})
    again = {"use": "s3d", "trained": str(tmp_path / "part.safetensors")}
    model = built(NAME, tables={"draft": again, "depth": {"use": "by-call"}})
    law(model, {n: t.detach() for n, t in run.part.items()}, [True, False, False, True])
    with pytest.raises(InputError, match="give length=… of more"):
        run.learn(ids[:, :5], torch.ones(2, 4))
    with pytest.raises(InputError, match="masks = 0 has nothing to train"):
        Masked(over_state(capture(module(NAME), max_context=CONTEXT)), S3d(masks=0))
    assert set(tensors) == {ROWS, DOWN, UP, LAYERS}
