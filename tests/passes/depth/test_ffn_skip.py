"""ffn-skip: MLPs left out by how alike they leave the stream, against a plain loop on transformers' module."""

from functools import partial

import numpy as np
import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.calibration import Calibration
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError, RecipeError
from accel.passes import run
from accel.passes.depth import _threshold
from accel.passes.depth._branches import branches
from accel.passes.depth._joint import layers
from accel.passes.depth.ffn_skip import FfnSkip, left_out, observed

from ...depth_case import KINDS, NEVER, branch_oracle, far, module_of, program_of

COUNT, PROMPT, SPAN = 7, 6, 2
TOKENS = np.random.default_rng(2).integers(3, 90, (2, 12))
OPTIONS = {"use": "ffn-skip", "ends": 1, "span": SPAN, "warmup": 0}
BEFORE = {
    "llama": lambda block: block.post_attention_layernorm,
    "gpt_neox": lambda block: block.input_layernorm,  # side by side: the stream before both
}


def plain(name, tokens, threshold, warmup=0, span=SPAN):
    """The module's logits [B,T,V] and the MLPs that ran [L,T]: tokens behind the prompt one by one, each decided layer
    by layer from what the module's own blocks compute.
    """
    ran, logits = np.ones((COUNT, tokens.shape[1]), bool), []
    for end in range(PROMPT, tokens.shape[1] + 1):
        limit = threshold if end - 1 - PROMPT >= warmup else NEVER
        found = decided(name, tokens[:, :end], ran, limit if end > PROMPT else NEVER, span)
        logits.append(found if end == PROMPT else found[:, -1:])
    return np.concatenate(logits, 1), ran


def decided(name, tokens, ran, threshold, span):
    """Logits with the MLPs `ran` [L,T], of the last token those that the loop decides on, which it notes there."""
    module, end, left, before, handles = module_of(COUNT, name), tokens.shape[1], 0, {}, []
    stack = next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))

    def note(_, args, index):
        before[index] = args[0][:, -1]

    def mlp(_, args, out, index):
        nonlocal left
        if 1 <= index < COUNT - 1:
            ran[index, end - 1] = left == 0
            near = torch.cosine_similarity(before[index], before[index] + out[:, -1], dim=-1)
            left = left - 1 if left else span * bool(near.min() >= threshold)
        return out * torch.from_numpy(ran[index, :end])[None, :, None]

    for i, block in enumerate(stack):
        handles += [
            BEFORE[name](block).register_forward_pre_hook(partial(note, index=i)),
            KINDS[name][1](block).register_forward_hook(partial(mlp, index=i)),
        ]
    with torch.no_grad():
        found = module(torch.tensor(tokens), use_cache=False).logits.numpy()
    for handle in handles:
        handle.remove()
    return found


def optimized(name="llama", target="eager", **options):
    return accel.optimize(
        *(module_of(COUNT, name), {"depth": {**OPTIONS, **options}}),
        target=target,
        max_context=64,
        max_batch=2,
        verify=False,
    )


def ran_by(session, tokens, **controls):
    """Logits of the last token of the prompt and of each behind it."""
    found = [session.prompt(tokens[:, :PROMPT])]
    for place in range(PROMPT, tokens.shape[1]):
        found.append(session.run(tokens[:, place : place + 1], **controls))
    return np.concatenate(found, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "target", "warmup"),
    [("llama", "eager", 0), ("llama", "onnx", 3), ("gpt_neox", "onnx", 0)],
)
def test_it_is_the_plain_loop(name, target, warmup):
    """For one row, and for two where both must be sure: by its own threshold after the warm-up, and by that of a call.
    The control: MLPs left out one layer longer.
    """
    with optimized(name, target, threshold=0.9, warmup=warmup) as compiled:
        for rows in (slice(0, 1), slice(0, 2)):
            tokens, counts = TOKENS[rows], set()
            for limit in (None, 0.97):
                given = {} if limit is None else {"threshold": limit}
                want, ran = plain(name, tokens, limit or 0.9, 0 if given else warmup)
                with compiled.session(len(tokens)) as session:
                    assert far(ran_by(session, tokens, **given), want[:, PROMPT - 1 :]) < 1e-4
                counts |= {*ran[:, PROMPT:].sum(0).tolist()}
            assert len(counts) > 2, "tokens leave out different MLPs"
            want, _ = plain(name, tokens, 0.9)
            assert far(plain(name, tokens, 0.9, span=SPAN + 1)[0], want) > 1e-3


def test_every_layer_has_keys_of_every_token():
    """So a call of several tokens runs all of them, over what single tokens left."""
    tokens = TOKENS[:1]
    with optimized(threshold=0.9) as compiled, compiled.session() as session:
        ran_by(session, tokens[:, :10])
        got = session.run(tokens[:, 10:], run_layers=np.ones(COUNT, bool))
        _, mask = plain("llama", tokens[:, :10], 0.9)
        assert not mask.all()
        mask = np.concatenate([mask, np.ones((COUNT, 2), bool)], 1)
        want = branch_oracle("llama", module_of(COUNT), tokens, mask | True, mask)[:, 10:]
        assert far(got, want) < 1e-4


@pytest.mark.long
def test_a_build_measures_the_threshold_at_which_the_share_is_left_out(monkeypatch):
    monkeypatch.setattr(_threshold, "TOKENS", 96)
    text = torch.from_numpy(np.random.default_rng(6).integers(3, 90, (4, 24)))
    program = program_of(COUNT, text)
    calls = layers(program)
    near = observed(program, calls, [branches(program, c) for c in calls], range(1, COUNT - 1))
    with torch.no_grad():
        states = module_of(COUNT)(text, output_hidden_states=True).hidden_states
    assert near.shape == (COUNT - 2, text.numel())
    for threshold in (-1.0, float(near.median()), 0.95, NEVER):
        gone = 0
        for token in near.T.tolist():
            left = 0
            for value in token:
                gone, left = (gone + 1, left - 1) if left else (gone, SPAN * (value >= threshold))
        assert left_out(near, threshold, SPAN) == pytest.approx(gone / text.numel())
    block = module_of(COUNT).model.layers[1]  # its own numbers, by transformers
    with torch.no_grad():
        after = states[2]
        before = after - block.mlp(block.post_attention_layernorm(before_mlp(text)))
    want = torch.cosine_similarity(before, after, dim=-1).flatten()
    np.testing.assert_allclose(near[0], want, atol=1e-5)
    built = capture(module_of(COUNT), max_context=64)
    built.calibration = Calibration(text, text, "given")
    run(built, [*pipeline(), FfnSkip(ends=1, span=SPAN, share=0.3)])
    limit = built.facts.depth.threshold
    assert left_out(near, limit, SPAN) / COUNT >= 0.3 > left_out(near, limit + 0.02, SPAN) / COUNT
    assert f"threshold {limit:.5g}, at which 96 tokens" in built.facts.notes[-1]
    with pytest.raises(
        PassError,
        match="at no threshold are 0.6 of the MLPs left out; give a share of at most 0.43",
    ):
        built = capture(module_of(COUNT), max_context=64)
        run(built, [*pipeline(), FfnSkip(ends=1, span=SPAN, share=0.6)])


def before_mlp(text):
    """The stream before the MLP of layer 1."""
    seen = []
    norm = module_of(COUNT).model.layers[1].post_attention_layernorm
    handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module_of(COUNT)(text)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": -1.0}, "threshold is -1.0; give at least 0"),
        ({"share": 1.0}, "share is 1.0; give more than 0 and less than 1"),
        ({"span": 0}, "span is 0; give 1 to 1024"),
        ({"ends": -1}, "ends is -1; give at least 0"),
        ({"warmup": -1}, "warmup is -1; give at least 0"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        FfnSkip(**options)


def test_a_model_without_layers_between_the_ends_is_refused():
    with pytest.raises(
        PassError, match="of 7 layers 3 at each end always run.*an ends of at most 2"
    ):
        optimized(ends=3)
