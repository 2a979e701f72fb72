"""layer-taylor: the saliency of layers, against torch's own gradients of transformers' module."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.passes import run
from accel.passes.depth import layer_taylor
from accel.passes.depth._joint import layers
from accel.passes.gradients import layer_gradients

from ...depth_case import LAYERS, module_of, program_of

TEXT = torch.from_numpy(np.random.default_rng(4).integers(3, 90, (5, 16)))


def gradients(module, text):
    """By autograd, of the mean loss of a token: name -> (weight, gradient), a list of layers."""
    module = copy.deepcopy(module)
    logits = module(text, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten()).backward()
    stack = module.transformer.h if hasattr(module, "transformer") else module.model.layers
    return [{n: (p.detach(), p.grad) for n, p in layer.named_parameters()} for layer in stack]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_saliency_is_that_of_plain_gradients(name):
    program = program_of(LAYERS, TEXT, name)
    plain = gradients(module_of(LAYERS, name), TEXT)
    want = [sum(float((w * g).abs().sum()) for w, g in layer.values()) for layer in plain]
    found, _ = layer_taylor.LayerTaylor().scores(program, layers(program), TEXT)
    np.testing.assert_allclose(found, want, rtol=1e-3)
    without = [  # the control: with a kind of weights left out the numbers are others
        sum(float((w * g).abs().sum()) for n, (w, g) in layer.items() if "proj" not in n and "c_" not in n)
        for layer in plain
    ]  # fmt: skip
    assert np.abs(np.subtract(without, want)).min() > 1e-2


def test_gradients_are_torchs_whatever_the_layer():
    """Of each layer, the last first; what is stacked in the program has as many numbers."""
    program = program_of(LAYERS, TEXT)
    plain, seen = gradients(module_of(LAYERS), TEXT), []
    for i, found in layer_gradients(program, layers(program), TEXT):
        seen.append(i)
        for kind in ("weight", "gradient"):
            mine = torch.cat([getattr(slope, kind).flatten() for slope in found.values()])
            other = torch.cat([pair[kind == "gradient"].flatten() for pair in plain[i].values()])
            np.testing.assert_allclose(mine.sort()[0], other.sort()[0], atol=1e-4, rtol=1e-3)
    assert seen == [3, 2, 1, 0]


@pytest.mark.long
def test_weights_or_gradients_of_zero_have_none():
    """Zeroed outputs leave the weights before them no gradient, and have no weight themselves."""
    module = copy.deepcopy(module_of(LAYERS))
    with torch.no_grad():
        module.model.layers[1].self_attn.o_proj.weight.zero_()
        module.model.layers[1].mlp.down_proj.weight.zero_()
        for weight in module.model.layers[2].parameters():
            weight.zero_()
    program = capture(module, max_context=64)
    run(program, pipeline())
    found, _ = layer_taylor.LayerTaylor().scores(program, layers(program), TEXT)
    assert found[1] == found[2] == 0 and found[0] > 0 and found[3] > 0


def test_halves_of_the_text_tell_how_sure_an_order_is():
    program = program_of(LAYERS, TEXT)
    method = layer_taylor.LayerTaylor()
    found, error = method.scores(program, layers(program), TEXT)
    sums = []
    for half in (TEXT[::2], TEXT[1::2]):
        plain = gradients(module_of(LAYERS), half)
        sums.append([sum(float((w * g).abs().sum()) for w, g in one.values()) for one in plain])
    one, two = (np.array(x) / sum(x) for x in sums)
    np.testing.assert_allclose(
        error, np.abs(one - two) / 2 * float(found.sum()), rtol=1e-2, atol=1e-3
    )


def test_the_text_is_cut_into_samples():
    program = program_of(LAYERS, TEXT)
    method = layer_taylor.LayerTaylor(length=5, tokens=20)
    assert torch.equal(method.text(program), TEXT[:, :15].reshape(15, 5)[:4])
    assert torch.equal(layer_taylor.LayerTaylor().text(program), TEXT)
