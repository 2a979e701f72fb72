"""Routers for small models, and what transformers' module computes where they choose."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.runs.routers import SoftLayers
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.passes.depth._routed import Learns
from accel.passes.trained import write

from .depth_case import KINDS, module_of

AXIS = find_axes()["depth"]
_FOLDER = TemporaryDirectory()

# Of an architecture: the norms that read the stream before attention and before the MLP.
BEFORE = {
    "llama": (lambda b: b.input_layernorm, lambda b: b.post_attention_layernorm),
    "gemma2": (lambda b: b.input_layernorm, lambda b: b.pre_feedforward_layernorm),
    "gpt_neox": (lambda b: b.input_layernorm, lambda b: b.input_layernorm),  # side by side
}
PLACES = {"attn": 0, "mlp": 1}


@cache
def soft(name, count, method):
    """A model of so many layers, and a method that has learnt nothing of it."""
    program = over_state(capture(module_of(count, name), max_context=64))
    return SoftLayers(program, AXIS.method(method)())


@cache
def part(name, count, method, seed=0, spread=1.0):
    """Router tensors for a model, by layer: as they start, plus noise."""
    made = soft(name, count, method)
    generator = torch.Generator().manual_seed(seed)
    parts = made.start(6, seed)
    for tensors in parts.values():
        for n, tensor in tensors.items():
            tensor += spread * torch.randn(tensor.shape, generator=generator) * 0.3
            tensors[n] = tensor.half().float()
    return parts


def file_of_part(name, count, method, parts):
    """The file of a trained part."""
    made = soft(name, count, method)
    file = Path(_FOLDER.name) / f"{len(list(Path(_FOLDER.name).iterdir()))}"
    write(made.method, file, parts, made.names, {})
    return str(file)


@cache
def trained(name, count, method):
    """The options by which a build finds a part; none where a method has none."""
    if not issubclass(AXIS.method(method), Learns):
        return {}
    return {"trained": file_of_part(name, count, method, part(name, count, method))}


@cache
def opened(name, count, method):
    """The same of a part with which nothing is weighed where nothing is left out."""
    if not issubclass(AXIS.method(method), Learns):
        return {}
    parts = {layer: dict(tensors) for layer, tensors in part(name, count, method).items()}
    for tensors in parts.values():
        for n, tensor in tensors.items():
            if n.endswith(".bias"):
                tensors[n] = torch.full_like(tensor, 1000.0)
    return {"trained": file_of_part(name, count, method, parts)}


def unit(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def routed_oracle(name, module, tokens, factor, targets):
    """The module's logits where what a branch adds is multiplied by `factor(target, layer, stream before it)`."""
    stack = next(m for m in module.modules() if isinstance(m, torch.nn.ModuleList))
    handles, seen = [], {}
    for target in targets:
        before, branch = (kinds[PLACES[target]] for kinds in (BEFORE[name], KINDS[name]))
        for layer, block in enumerate(stack):

            def note(_, args, key=(target, layer)):
                seen[key] = args[0]

            def weigh(_, args, out, key=(target, layer)):
                value = out[0] if isinstance(out, tuple) else out
                new = value * factor(*key, seen[key])
                return (new, *out[1:]) if isinstance(out, tuple) else new

            handles += [
                before(block).register_forward_pre_hook(note),
                branch(block).register_forward_hook(weigh),
            ]
    with torch.no_grad():
        found = module(torch.tensor(tokens), use_cache=False).logits.numpy()
    for handle in handles:
        handle.remove()
    return found


def ran_by(compiled, tokens, prompt, **controls):
    """Logits [B,T,V] of a prompt and single tokens behind it."""
    with compiled.session(len(tokens)) as session:
        found = [session.run(tokens[:, :prompt], **controls)]
        for place in range(prompt, tokens.shape[1]):
            found.append(session.run(tokens[:, place : place + 1], **controls))
    return np.concatenate(found, 1)
