"""What small models of four layers compute where tokens pass layers by."""

from functools import cache

import models
import numpy as np
import torch

from accel.compiler.pipeline import pipeline
from accel.ir.calibration import Calibration
from accel.ir.capture.capture import capture
from accel.passes import run

LAYERS, NEVER = 4, 2.0
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 24))
WHOLE = np.ones(LAYERS, bool)


def oracle(module, tokens, ran):
    """The module's logits where token t goes through the layers ran[:,t] and passes the others by,
    which all the same make keys and values of it.
    """
    stack = module.transformer.h if hasattr(module, "transformer") else module.model.layers
    handles = []
    for layer, mask in zip(stack, torch.from_numpy(np.array(ran)), strict=True):

        def skip(_, args, kwargs, out, mask=mask):
            x = args[0] if args else kwargs["hidden_states"]
            got = out[0] if isinstance(out, tuple) else out
            new = torch.where(mask[None, :, None], got, x)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handles.append(layer.register_forward_hook(skip, with_kwargs=True))
    with torch.no_grad():
        found = module(torch.tensor(tokens), use_cache=False).logits.numpy()
    for handle in handles:
        handle.remove()
    return found


def far(got, want):
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))


def plan(*kept):
    return np.isin(np.arange(LAYERS), kept)


@cache
def module_of(count, name="llama"):
    return models.make(name, count)


@cache
def _program(count, name):
    made = capture(module_of(count, name), max_context=64)
    run(made, pipeline())
    return made


def program_of(count, text, name="llama"):
    """A captured model of so many layers as a depth method finds it, with a calibration text [n,T]."""
    made = _program(count, name).copy()
    made.calibration = Calibration(text, text, "given")
    return made


def losses_without(module, text, gone):
    """Of each row of text [n,T], the loss of a module that these layers change nothing of: [n]."""
    ran = np.ones((module.config.num_hidden_layers, text.shape[1]), bool)
    ran[list(gone)] = False
    odds = torch.from_numpy(oracle(module, text.numpy(), ran)).log_softmax(-1)
    return -odds[:, :-1].gather(-1, text[:, 1:, None])[..., 0].double().sum(1)


# Of an architecture: what in a block gives that which attention, and the MLP, adds to the stream.
KINDS = {
    "llama": (lambda b: b.self_attn, lambda b: b.mlp),
    "gpt2": (lambda b: b.attn, lambda b: b.mlp),
    "gemma2": (lambda b: b.post_attention_layernorm, lambda b: b.post_feedforward_layernorm),
    "gpt_neox": (lambda b: b.attention, lambda b: b.mlp),  # side by side
    "cohere": (lambda b: b.self_attn, lambda b: b.mlp),  # side by side
}


def branch_oracle(name, module, tokens, attn, mlp):
    """The module's logits where branches of token t add to the stream in the layers attn[:,t] and mlp[:,t] alone."""
    stack = next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
    handles = []
    for find, ran in zip(KINDS[name], (attn, mlp), strict=True):
        for layer, mask in zip(stack, torch.from_numpy(np.array(ran)), strict=True):

            def off(_, args, out, mask=mask):
                value = out[0] if isinstance(out, tuple) else out
                new = value * mask[None, :, None]
                return (new, *out[1:]) if isinstance(out, tuple) else new

            handles.append(find(layer).register_forward_hook(off))
    with torch.no_grad():
        found = module(torch.tensor(tokens), use_cache=False).logits.numpy()
    for handle in handles:
        handle.remove()
    return found
