"""Encoder-decoders whose decoder sees both ways, for tests."""

from copy import copy
from functools import cache

import torch

import accel
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.axis import find_axes
from accel.ir.capture.arch.da_transformer import DaTransformer, DaTransformerConfig

CONFIG = DaTransformerConfig(23, 16, 32, 1, 2, 2, 48, 2, 8, upsample_scale=3.0)
SOURCES = [[5, 9, 7, 11], [8, 6], [12, 4, 19, 20, 7]]
START, LONGEST = 1, 40


@cache
def graphs():
    """A DA-Transformer whose vertices differ in their tokens."""
    torch.manual_seed(0)
    made = DaTransformer(CONFIG).eval()
    with torch.no_grad():
        made.decoder.embed_positions.weight.mul_(3)
        for layer in made.decoder.layers:
            layer.down.weight.mul_(9)
        made.decoder.embed_tokens.weight.mul_(0.5)
    return made


@cache
def rewriter():
    """A T5 without a causal mask in its decoder, and without a mask token."""
    from transformers import AutoModelForSeq2SeqLM

    module = randomise(AutoModelForSeq2SeqLM.from_config(small_config("t5")), "t5").eval()
    module.decoder.config.is_causal = False
    module.generation_config.decoder_start_token_id = START
    return module


@cache
def made(name, target):
    """The build of `graphs` for da-transformer, else of `rewriter`."""
    module = graphs() if name == "da-transformer" else rewriter()
    recipe = {"loop": {"use": name}}
    return accel.optimize(module, recipe, target=target, max_context=LONGEST, max_batch=3)


def built(name, target="eager", **options):
    """The same with these options of its loop."""
    model = copy(made(name, target))
    model._loop = find_axes()["loop"].build(name, **options)
    return model
