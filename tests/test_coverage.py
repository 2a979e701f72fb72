"""Two dozen types of transformers, of which each needs something else; tools/matrix/coverage.py runs all."""

import coverage
import pytest
import torch

import accel
from accel.compiler.smoke.tiny_models import small_config, small_model

TYPES = {
    "afmoe": "experts in a list, windows in three of four layers, gated attention",
    "bart": "the decoder half, positions from 2 on",
    "bamba": "attention and Mamba-2 in turn",
    "bloom": "ALiBi, heads folded into the batch",
    "cohere2": "parallel residual, windows, interleaved rotation",
    "dbrx": "clipped qkv, experts in one matrix",
    "deepseek_v3": "latent attention, grouped routing",
    "falcon": "one KV head, parallel residual",
    "gemma2": "soft caps",
    "gpt_neo": "unscaled scores, local layers",
    "gpt_oss": "attention sinks",
    "granitemoe": "experts sorted by choice",
    "jamba": "Mamba, attention and experts",
    "lfm2": "short convolutions",
    "llama4_text": "chunks, complex rotation, layers without positions",
    "mamba": "no attention at all",
    "mamba2": "a state per head",
    "mixtral": "experts",
    "mpt": "ALiBi as a position bias of the module",
    "nemotron": "half of each head turns",
    "phi3": "fused qkv",
    "recurrent_gemma": "a gated linear recurrence and local attention",
    "roberta": "a bidirectional type as decoder, positions from 2 on",
    "rwkv": "a recurrence with a running maximum",
    "smollm3": "some layers without rotation",
}


SLOW = ("llama4_text", "mixtral")
ALL = [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in TYPES]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_a_type_is_right(name):
    result = coverage.measure(name)
    assert (result.state, result.why) == ("right", "")


def test_a_wrong_build_is_found_in_every_part():
    model = small_model("llama")
    with accel.optimize(model, target="eager", max_context=64, max_batch=3) as compiled:
        projection = model.model.layers[0].self_attn.o_proj
        projection.weight = torch.nn.Parameter(projection.weight * 1.01)  # not the program's
        errors = coverage.check(model, compiled)
    assert set(errors) == set(coverage.PARTS)
    assert all(e > coverage.TOLERANCE for e in errors.values()), errors


def test_small_configurations_keep_what_is_architectural():
    config = small_config("gemma3_text")
    assert {*config.layer_types} == {"sliding_attention", "full_attention"}
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert config.vocab_size % 8


def test_an_unknown_type_is_refused_with_the_near_name():
    with pytest.raises(accel.CaptureError, match="model type 'lama'.*llama"):
        small_config("lama")
