"""The entry `exit`: the head's token of the stream behind any layer, as the module's own norm and head give it."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.entries.exit import CHANCE, EXIT, ROWS, STREAM, TOKEN
from accel.ir.errors import PassError
from accel.ir.taps import stream
from accel.passes.state import exits
from accel.passes.state.exits import Exits
from accel.runtime.draft.layerskip import LayerSkip

LAYERS = 3
TOKENS = np.array([[3, 5, 7, 11, 2], [9, 8, 4, 0, 0]])
COUNTS = [5, 3]
PLACES = np.array([[0, 2, 4], [0, 1, 2]])


def build(monkeypatch, module, target, **more):
    monkeypatch.setattr(LayerSkip, "steps", lambda self: [Exits(self)])
    monkeypatch.setattr(LayerSkip, "taps", lambda self, layers: [stream(0), stream(1)])
    recipe = {"draft": {"use": "layerskip"}, **more}
    return accel.optimize(module, recipe, target=target, max_context=32, max_batch=2)


@torch.no_grad()
def published(module, ids, layer):
    """The likeliest tokens [T] of the module's norm and head behind a layer, and their probabilities."""
    inner = module.get_decoder()
    held = []
    (getattr(inner, "layers", None) or inner.h)[layer].register_forward_hook(
        lambda _, __, out: held.append(out[0] if isinstance(out, tuple) else out)
    )
    module(torch.tensor([ids]))
    norm = inner.norm if hasattr(inner, "norm") else inner.ln_f
    logits = module.lm_head(norm(held[0]))
    if cap := getattr(module.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    best = logits.float().softmax(-1).max(-1)
    return best.indices.reshape(-1).numpy(), best.values.reshape(-1).numpy()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, target",
    [("llama", "eager"), ("llama", "onnx"), ("gpt2", "onnx"), ("gemma2", "onnx")],
)
def test_it_is_what_the_modules_head_says(monkeypatch, name, target):
    torch.manual_seed(0)
    module = models.make(name, LAYERS).eval()
    with build(monkeypatch, module, target) as made, made.session(2) as session:
        got = session.step(TOKENS, COUNTS, want=[stream(0), stream(1)])
        before = {n: a.copy() for n, a in session._core.backend.buffers().items()}
        for layer in (0, 1):
            out = session.entry(EXIT.name, {STREAM: got.extra[stream(layer)], ROWS: PLACES})
            assert out.keys() == {TOKEN, CHANCE}
            for row, count in enumerate(COUNTS):
                token, chance = published(module, TOKENS[row, :count].tolist(), layer)
                assert out[TOKEN][row].tolist() == token[PLACES[row]].tolist()
                np.testing.assert_allclose(out[CHANCE][row], chance[PLACES[row]], rtol=1e-3)
        after = session._core.backend.buffers()
        assert all(np.array_equal(value, after[n]) for n, value in before.items())
        assert session.lengths.tolist() == COUNTS


def test_streams_behind_layers_that_are_left_out_pass_through(monkeypatch):
    """What a call without a layer says of it is what is in front of it."""
    module = models.make("llama", LAYERS).eval()
    with build(monkeypatch, module, "onnx") as made, made.session(2) as session:
        plan = np.array([True, False, True])
        got = session.step(TOKENS, COUNTS, want=[stream(0), stream(1)], run_layers=plan).extra
        np.testing.assert_array_equal(got[stream(0)], got[stream(1)])


def test_a_graph_without_layers_is_refused(monkeypatch):
    monkeypatch.setattr(exits, "layer_calls", lambda graph: [])
    with pytest.raises(PassError, match=r"draft.layerskip .* no layers .* build without it"):
        build(monkeypatch, models.make("llama", LAYERS).eval(), "eager")
