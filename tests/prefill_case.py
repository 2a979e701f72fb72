"""Small models whose prompts are pruned, and what attention reads in transformers' own code."""

from contextlib import contextmanager
from types import SimpleNamespace

import models
import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel.ir.capture import capture
from accel.ir.recipe import Recipe
from accel.passes.check import NumericCheck
from accel.runtime import optimize as building
from accel.runtime.assemble import assemble

LAYERS, KEPT = 3, 12
LENGTHS = np.array([30, 21, 7])
TOKENS = np.random.default_rng(0).integers(3, 50, (3, 48))
_MADE: dict = {}


def module(name):
    if name not in _MADE:
        layers, models.LAYERS = models.LAYERS, LAYERS
        try:
            _MADE[name] = models.ARCHITECTURES[name]()
        finally:
            models.LAYERS = layers
    return _MADE[name]


def built(name, target="eager", tables=None, **prune):
    """A build of three layers; `prune`: the table of prefill.prune. Made once, out of one capture."""
    key = (name, target, str(tables), *prune.items())
    if key not in _MADE:
        if ("program", name) not in _MADE:
            _MADE["program", name] = capture(module(name), max_context=64)
            _MADE["program", name].facts.max_batch = 3
        tables = {**({"prefill.prune": prune} if prune else {}), **(tables or {})}
        program = _MADE["program", name].copy()
        job = building._Job(assemble(Recipe(tables=tables)), target, lambda *_: None)
        check = NumericCheck(program) if target == "onnx" else None
        building._rewrite(job, program, check, None)
        if target == "eager":
            _MADE[key] = building._in_process(job, program, None, None)
        else:
            _MADE[key] = building._artifact(job, program, check, None, None)
    return _MADE[key]


@contextmanager
def read():
    """layer -> (queries [B,H,T,D], keys [B,G,T,D], scale) of transformers' attention while it runs."""
    seen, plain = {}, ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, query, key, value, *rest, **more):
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        seen[module.layer_idx] = SimpleNamespace(q=query, k=key, scale=scale)
        return plain(module, query, key, value, *rest, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = spy
    try:
        yield seen
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def hiding(model, tokens, kept, layer):
    """Logits [T,V] of transformers' own model where layers after `layer` hide all but the `kept` of the
    first tokens, up to the last of these, from every token.
    """
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    gone = np.setdiff1d(np.arange(kept[-1]), kept)

    def attend(module, query, key, value, *rest, **more):
        if module.layer_idx <= layer:
            return plain(module, query, key, value, *rest, **more)
        repeat, count = query.shape[1] // key.shape[1], query.shape[2]
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        scores = query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scale
        hidden = torch.ones(count, count).triu(1).bool()
        hidden[:, gone] = True
        hidden[range(count), range(count)] = False  # nobody reads what is made of tokens that are gone
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (probs @ value.repeat_interleave(repeat, 1)).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        with torch.no_grad():
            return model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def last_scores(model, row, layer):
    """q k^T of the last token's queries [H,T], the model's own attention read."""
    with read() as seen, torch.no_grad():
        model(torch.tensor(row)[None], use_cache=False)
    q, k = seen[layer].q[0], seen[layer].k[0]
    return (q[:, -1:] @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(1, 2))[:, 0]


def best(scores, count, *always):
    """The positions of the highest of scores [T], and those that always stay, in order."""
    scores = scores.clone()
    scores[list(always)] = torch.inf
    return sorted(scores.topk(min(count, len(scores))).indices.tolist())


def far(got, want):
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
