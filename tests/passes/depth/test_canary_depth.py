"""canary-depth, and other deleting methods, on encoder-decoder models: the decoder is what loses layers."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

import accel
from accel.compiler.smoke.tiny_models import randomise, seeded, small_config
from accel.ir.recipe import Recipe
from accel.passes.depth._joint import layers
from accel.passes.depth.canary_depth import CanaryDepth
from accel.passes.depth.shortgpt import ShortGPT

from ...depth_case import far, program_of

LAYERS, ENCODERS = 4, 2
TOKENS = np.random.default_rng(5).integers(3, 50, (2, 9))


@pytest.fixture(scope="module", params=["t5", "whisper"])
def module(request):
    own = {"encoder_layers": ENCODERS, "decoder_layers": LAYERS}
    auto = AutoModelForSpeechSeq2Seq
    if request.param == "t5":
        own, auto = {"num_layers": ENCODERS, "num_decoder_layers": LAYERS}, AutoModelForSeq2SeqLM
    with seeded():
        made = auto.from_config(small_config(request.param, **own))
    return randomise(made, request.param).eval()


def without(module, gone, source):
    """transformers' logits [2,T,V], each row with its source, of a decoder that passes these layers by."""
    decoder = module.get_decoder()
    stack = decoder.block if hasattr(decoder, "block") else decoder.layers

    def skip(_, args, kwargs, out):
        x = args[0] if args else kwargs["hidden_states"]
        return (x, *out[1:]) if isinstance(out, tuple) else x

    handles = [stack[i].register_forward_hook(skip, with_kwargs=True) for i in gone]
    with torch.no_grad():
        inputs = {module.main_input_name: torch.tensor(np.stack(source))}
        found = module(**inputs, decoder_input_ids=torch.tensor(TOKENS), use_cache=False).logits
    for handle in handles:
        handle.remove()
    return found.numpy()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "recipe",
    [
        "canary-depth",
        {"depth": {"use": "sleb", "tokens": 128}},
        {"depth": {"use": "layer-taylor", "tokens": 128}},
    ],
    ids=["canary-depth", "sleb", "layer-taylor"],
)
def test_the_decoder_loses_layers_with_their_cross_attention(module, recipe):
    sizes = {"max_context": 64, "max_batch": 2}
    with accel.optimize(module, recipe, target="eager", verify=False, **sizes) as built:
        (note,) = (n for n in built.report["notes"] if "deleted layers" in n)
        gone = [int(i) for i in re.findall(r"(\d+) \(\d", note)]
        left = LAYERS - len(gone)
        assert len(gone) == (2 if recipe == "canary-depth" else 1) and f"of {LAYERS} " in note
        facts, program = built.facts, built.program
        assert facts.num_layers == left and facts.encoder is not None
        cross = [n for n in program.entries["encode"].outputs if n.startswith("cross.")]
        assert {n.split(".")[1] for n in cross} - {"pos"} == {str(i) for i in range(left)}
        rng = np.random.default_rng(3)
        source = [
            rng.standard_normal(facts.encoder.features, np.float32)
            if facts.encoder.features
            else rng.integers(3, 50, 11)
            for _ in TOKENS
        ]
        got = built.logits(TOKENS, encoder_input=source)
    assert far(got, without(module, gone, source)) < 1e-4
    assert far(got, without(module, [], source)) > 1e-2, "the control: they do something"
    other = [i % 2 + 1 for i in gone][:1] if len(gone) == 1 else gone[:1]
    assert far(got, without(module, other, source)) > 1e-2, "the control: other layers"


def test_its_order_is_that_of_shortgpt():
    """The recipe halves; of the same share the two delete the same layers."""
    assert Recipe.load("canary-depth").tables["depth"]["share"] == CanaryDepth().share == 0.5
    text = torch.from_numpy(np.random.default_rng(4).integers(3, 90, (4, 30)))
    program = program_of(6, text)
    methods = CanaryDepth(share=0.34), ShortGPT(share=0.34)
    one, other = (m.goes(program, layers(program), 2, text) for m in methods)
    assert one == other and len(one) == 2
