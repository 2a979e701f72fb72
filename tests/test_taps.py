"""Outputs of the step: the residual stream, keys and values, as transformers gives them."""

from dataclasses import replace

import models
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.compiler.over_state import over_state
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.capture.capture import capture
from accel.ir.entries.genai import GENAI
from accel.ir.entries.step import LOGITS
from accel.ir.errors import PassError
from accel.ir.taps import EMBEDS, FINAL, keys, stream, values
from accel.passes.state.concat import Concat
from accel.passes.state.kv_taps import KvTaps
from accel.runtime.loop.contrastive import Contrastive

LAYERS = 2
NAMES = (EMBEDS, stream(0), stream(1), FINAL)
TOKENS = np.array([[3, 5, 7, 11, 2], [9, 8, 4, 0, 0]])
COUNTS = [5, 3]


def build(monkeypatch, module, target, names=NAMES):
    monkeypatch.setattr(Contrastive, "taps", lambda self, layers: names)
    return accel.optimize(
        module, {"loop": {"use": "contrastive"}}, target=target, max_context=32, max_batch=2
    )


@torch.no_grad()
def published(module, ids):
    """What each name has for a text: the norm is in transformers' last one alone."""
    inner, streams = module.get_decoder(), {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, i=i: streams.__setitem__(
                stream(i), out[0] if isinstance(out, tuple) else out
            )
        )
        for i, layer in enumerate(getattr(inner, "layers", None) or inner.h)
    ]
    out = module(torch.tensor([ids]), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return {EMBEDS: out.hidden_states[0][0], FINAL: out.hidden_states[-1][0]} | {
        name: value[0] for name, value in streams.items()
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, target",
    [("llama", "eager"), ("llama", "onnx"), ("gpt2", "onnx"), ("gemma2", "onnx")],
)
def test_each_is_what_transformers_gives(monkeypatch, name, target):
    torch.manual_seed(0)
    module = models.make(name, LAYERS).eval()
    with build(monkeypatch, module, target) as made, made.session(2) as session:
        assert set(session.extra) == set(NAMES)
        whole = session.step(TOKENS, COUNTS, want=NAMES)
        more = session.step([[6], [6]], want=[FINAL], last_only=True)
        plain = made.session(2)
        np.testing.assert_array_equal(plain.run(TOKENS, COUNTS), whole.logits)
    for row, count in enumerate(COUNTS):
        ids = TOKENS[row, :count].tolist()
        for wanted, value in published(module, ids).items():
            found = whole.extra[wanted][row]
            np.testing.assert_allclose(found[:count], value, atol=2e-5, rtol=2e-4, err_msg=wanted)
            assert not found[count:].any()
        last = published(module, [*ids, 6])[FINAL][-1]
        np.testing.assert_allclose(more.extra[FINAL][row, 0], last, atol=2e-5, rtol=2e-4)
        other = published(module, ids)[stream(0)]
        assert np.abs(whole.extra[stream(1)][row, :count] - other.numpy()).max() > 1e-2


def test_what_scales_the_last_layer_is_of_it_and_the_norm_behind(monkeypatch):
    """Gemma 4 multiplies what a layer gives by a number."""
    found = small_config(
        "gemma4_text", **{f"{n}_size_per_layer_input": 0 for n in ("hidden", "vocab")}
    )
    module = randomise(AutoModelForCausalLM.from_config(found), "scaled").eval()
    module.get_decoder().layers[-1].layer_scalar.fill_(0.7)
    names = (FINAL, *(stream(i) for i in range(module.config.num_hidden_layers)))
    with build(monkeypatch, module, "eager", names) as made, made.session(1) as session:
        found = session.step(TOKENS[:1], want=names).extra
    wanted = published(module, TOKENS[0].tolist())
    for name in names:
        np.testing.assert_allclose(found[name][0], wanted[name], atol=2e-5, err_msg=name)
    unscaled = np.abs(found[names[-1]][0] / 0.7 - wanted[names[-1]].numpy()).max()
    assert unscaled > 1e-2, "the control"


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [NAMES, (keys(1), values(1))])
def test_logits_are_those_of_a_model_without(monkeypatch, names):
    module = models.make("llama", LAYERS).eval()
    with (
        build(monkeypatch, module, "onnx", names) as made,
        accel.optimize(module, "base", target="onnx", max_context=32, max_batch=2) as base,
    ):
        with made.session(2) as one, base.session(2) as other:
            np.testing.assert_array_equal(one.run(TOKENS, COUNTS), other.run(TOKENS, COUNTS))
            assert not other.extra


def test_a_name_that_no_layer_has_is_refused(monkeypatch):
    with pytest.raises(PassError, match=r"loop.contrastive: .*stream.2.*stream.1"):
        build(monkeypatch, models.make("llama", LAYERS).eval(), "eager", (stream(2),))


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_keys_and_values_are_those_of_the_cache(monkeypatch, target):
    """Of every token of each call, turned by its position. The control: those of the layer before."""
    module, names = models.make("llama", LAYERS).eval(), (keys(1), values(1))
    with build(monkeypatch, module, target, names) as made, made.session(2) as session:
        whole = session.step(TOKENS, COUNTS, want=names)
        more = session.step([[6], [6]], want=names)
        buffers = session._core.backend.buffers()
        for name, part in zip(names, "kv", strict=True):
            for row, count in enumerate(COUNTS):
                held, before = (
                    buffers[f"kv.{layer}.{part}"][row, :, : count + 1].swapaxes(0, 1)
                    for layer in (1, 0)
                )
                parts = [whole.extra[name][row, :count], more.extra[name][row]]
                found = np.concatenate(parts)
                np.testing.assert_array_equal(found, held.reshape(count + 1, -1))
                assert np.abs(found - before.reshape(count + 1, -1)).max() > 1e-2
            ids = torch.tensor([[*TOKENS[0].tolist(), 6]])
            cache = module(ids, use_cache=True).past_key_values.layers[1]
            want = (cache.keys if part == "k" else cache.values)[0].transpose(0, 1).flatten(1)
            found = np.concatenate([whole.extra[name][0], more.extra[name][0]])
            np.testing.assert_allclose(found, want.detach(), atol=2e-5, rtol=2e-4)


def test_clients_of_another_runtime_get_none_of_them(monkeypatch):
    """The entry for onnxruntime-genai has no slots to read keys from."""
    monkeypatch.setattr(Contrastive, "taps", lambda self, layers: (keys(1), values(1)))
    program = over_state(capture(models.make("llama", LAYERS).eval(), max_context=32))
    KvTaps((Contrastive(),)).run(program)
    assert Concat().run(program).changed
    step, genai = (set(e.output_nodes()) for e in (program.step, program.entries[GENAI.name]))
    assert {keys(1), values(1)} <= step and LOGITS in genai
    assert genai.isdisjoint({keys(1), values(1)})


def with_shares(program):
    program.facts.layers[1] = replace(program.facts.layers[1], shares=0)
    return program


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("plain_latent", lambda p: p, "it has a latent, or values of another width"),
        ("mamba", lambda p: p, "it attends 0 times"),
        ("llama", with_shares, "it reads those of layer 0"),
    ],
)
@pytest.mark.few(1)
def test_layers_without_keys_and_values_of_their_own_are_refused(monkeypatch, kind, change, words):
    monkeypatch.setattr(Contrastive, "taps", lambda self, layers: (keys(1), values(1)))
    program = change(over_state(capture(models.make(kind, LAYERS).eval(), max_context=32)))
    with pytest.raises(
        PassError, match=f"loop.contrastive reads the keys and values of layer 1, but {words}"
    ):
        KvTaps((Contrastive(),)).run(program)
