"""Small models whose prompts are pruned, and what attention reads in transformers' own code."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import models
import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel.compiler.artifact_build import write_artifact
from accel.compiler.assemble import assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.in_process import in_process_model
from accel.compiler.job import Job
from accel.compiler.over_state import over_state, shared
from accel.compiler.rewrite import rewrite
from accel.ir.capture.capture import capture
from accel.ir.recipe import Recipe
from accel.passes import run
from accel.passes.check import NumericCheck

LAYERS, KEPT = 3, 12
CONTEXT = 128  # as of other programs whose traces these share
LENGTHS = np.array([30, 21, 7])
TOKENS = np.random.default_rng(0).integers(3, 50, (3, 48))
_MADE: dict = {}


@cache
def module(name):
    """An architecture's module; of other layers than LAYERS where the name says, as llama:4."""
    kind, _, count = name.partition(":")
    return models.make(kind, int(count or LAYERS))


def built(name, target="eager", tables=None, **prune):
    """A build of three layers; `prune`: the table of prefill.prune. Made once, out of one capture."""
    key = (name, target, str(tables), *prune.items())
    if key not in _MADE:
        begun = ("program", name, target)
        if begun not in _MADE:
            _MADE[begun] = capture(module(name), max_context=CONTEXT)
            _MADE[begun].facts.max_batch = 3
            if target == "eager":  # of which no pass is checked
                over_state(_MADE[begun])
        tables = {**({"prefill.prune": prune} if prune else {}), **(tables or {})}
        program = _MADE[begun].copy()
        job = Job(assemble(Recipe(tables=tables)), BuildOptions(target=target), lambda *_: None)
        check = NumericCheck(program) if target == "onnx" else None
        if target == "eager":
            rewritten(job, program)
            _MADE[key] = in_process_model(job, program, None, None)
        else:
            rewrite(job, program, check)
            _MADE[key] = write_artifact(job, program, check, None, None)
    return _MADE[key]


def rewritten(job, program):
    """The passes of a recipe from its own on, over a program over state."""
    passes = job.passes()
    own = shared(passes)
    job.steps += run(program, passes[own:], done=passes[:own])


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
        hidden[range(count), range(count)] = (
            False  # nobody reads what is made of tokens that are gone
        )
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (probs @ value.repeat_interleave(repeat, 1)).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        with torch.no_grad():
            return model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def cascade(model, tokens, count, choose, heads=lambda layer, out: torch.ones(1)):
    """Logits [T,V] of transformers' own model, whose layers drop tokens of a prompt of `count` one after the other:
    choose(layer, probs [H,K,K], kept [K]) says after each which of the kept ones the next layers read;
    `heads(layer, out [H,K,D])`, which of the query heads: a mask [H].
    """
    plain, kept = ALL_ATTENTION_FUNCTIONS["sdpa"], np.arange(count)
    mask = torch.ones(1)

    def attend(module, query, key, value, *rest, **more):
        nonlocal kept, mask
        repeat, total = query.shape[1] // key.shape[1], query.shape[2]
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        scores = query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scale
        hidden = torch.ones(total, total).triu(1).bool()
        hidden[:, np.setdiff1d(np.arange(count), kept)] = True
        hidden[range(total), range(total)] = False
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = (probs @ value.repeat_interleave(repeat, 1)) * mask[:, None, None]
        some = (probs[0] * mask[:, None, None])[:, kept][:, :, kept]
        mask = heads(module.layer_idx, out[0][:, kept])
        kept = np.array(choose(module.layer_idx, some, kept))
        return out.transpose(1, 2), None

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


def critical(model, tokens, count, *, segment, block, budget, threshold, fusion=0.25):
    """Logits [T,V] of transformers' own model where segments of a prompt of `count` tokens read the blocks
    of keys that CritiPrefill says.
    """
    plain, before = ALL_ATTENTION_FUNCTIONS["sdpa"], {}

    def attend(module, query, key, value, *rest, **more):
        if module.layer_idx < 1:
            return plain(module, query, key, value, *rest, **more)
        heads, groups = query.shape[1], key.shape[1]
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        hidden = torch.ones(heads, *[query.shape[2]] * 2).triu(1).bool()
        for start in range(0, count, segment):
            if start < max(threshold, budget) or start + segment >= count:
                continue
            for g in range(groups):
                mine = range(g * heads // groups, (g + 1) * heads // groups)
                worth = []
                for at in range(0, start, block):
                    k = key[0, g, at : at + block]
                    each = []
                    for h in mine:
                        q = query[0, h, start : start + segment]
                        ends = torch.stack([q.amax(0), q.amin(0)])
                        each.append(max((ends @ k.amax(0)).mean(), (ends @ k.amin(0)).mean()))
                    worth.append(sum(each) / len(each))
                share = (torch.stack(worth) * scale).softmax(0)
                if (start, g) in before:
                    share = fusion * before[start, g] + (1 - fusion) * share
                before[start, g] = share
                for at in set(range(len(worth))) - set(
                    share.topk(budget // block).indices.tolist()
                ):
                    hidden[mine, start : start + segment, at * block : (at + 1) * block] = True
        keys, values = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        scores = (query @ keys.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        with torch.no_grad():
            return model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
