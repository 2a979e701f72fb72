"""Masked-diffusion models for tests, and decoding of one row as it is published, plainly and without accel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from accel.compiler.facts_json import model_facts
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.compiled import CompiledModel

VOCABULARY, MASK, LONGEST = 41, 40, 96


class Filler(nn.Module):
    """Two layers that see both ways, with the caches of Fast-dLLM beside its forward."""

    def __init__(self, shift: bool, width: int = 32, heads: int = 4, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(mask_token_id=MASK, logit_shift=shift)
        self.shift, self.heads = int(shift), heads
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            self.head.weight.mul_(6)
            for part in self.qkv:
                part.weight.mul_(2)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x)

    @torch.no_grad()
    def cached(self, tokens, start, store):
        """Logits of tokens [T] at `start`.., over keys and values that `store` has of the others and gets of these."""
        x = self.tokens(tokens) + self.places(torch.arange(start, start + len(tokens)))
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3).unbind(0)
            if layer in store:
                keys, values = (part.clone() for part in store[layer])
                keys[:, start : start + len(tokens)], values[:, start : start + len(tokens)] = k, v
                k, v = keys, values
            store[layer] = k, v
            weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
            x = x + out((weights @ v).transpose(0, 1).flatten(1))
        return self.head(x)


def official(
    model: Filler,
    prompt: Any,
    new: int,
    block: int,
    stays: Any,
    cache: str = "none",
    early: Any = None,
) -> tuple[list[int], int]:
    """New tokens and calls. `stays(confidence [K], step, masks)`: which slots of a block are filled, -inf where one
    is. `early(lead of masks, share of steps done)`: whether all that is left is filled at once.
    """
    x = torch.tensor([*prompt, *[MASK] * new])
    calls, start = 0, len(prompt)
    while start < len(x):
        stop = min(start + block, len(x))
        step, masks, store = 0, int((x[start:stop] == MASK).sum()), {}
        while (x[start:stop] == MASK).any():
            whole = step == 0 or cache == "none"
            first = 0 if whole else start - model.shift
            last = stop if cache == "dual" and not whole else len(x)
            logits = model.cached(x[first:last], first, {} if cache == "none" else store)
            calls += 1
            at = torch.arange(start, last)
            scores = logits[at - model.shift - first]
            scores[:, MASK] = -torch.inf
            token, free = scores.argmax(-1), x[at] == MASK
            sure = scores.softmax(-1).max(-1).values.masked_fill(~free, -torch.inf)
            top = scores.topk(2).values
            done = (start - len(prompt) + step) / new
            if early is not None and early((top[:, 0] - top[:, 1])[free], done):
                x[at[free]] = token[free]
                break
            chosen = stays(sure[: stop - start], step, masks)
            x[at[chosen]] = token[chosen]
            step += 1
        start = stop
    return x[len(prompt) :].tolist(), calls


def surest(count):
    """`count` of each call: low confidence is put off."""
    return lambda sure, step, masks: sure.topk(min(count, int((sure > -1).sum()))).indices


def above(threshold):
    """Fast-dLLM's threshold."""
    return lambda sure, step, masks: ((sure >= threshold) | (sure == sure.max())).nonzero()[:, 0]


def by_factor(factor):
    """Fast-dLLM's factor: n + 1 slots are too many as soon as (n + 1)(1 - confidence) is not below it."""

    def stays(sure, step, masks):
        order = sure.sort(descending=True)
        count = int((sure > -1).sum())
        for n in range(1, count + 1):
            if (n + 1) * (1 - order.values[n - 1]) >= factor:
                return order.indices[: max(1, n - 1)]
        return order.indices[:count]

    return stays


def with_loop(compiled: CompiledModel, use: str, **options: Any) -> CompiledModel:
    """The same program under another loop, without a build."""
    recipe = {"tables": {"loop": {"use": use, **options}}}
    program = compiled.program
    program.facts.max_batch = 2
    return CompiledModel(
        EagerBackend(program), model_facts(program), tokenizer=compiled.tokenizer, recipe=recipe
    )


def prompts(seed: int = 0, sizes: tuple[int, ...] = (5, 11)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MASK, n).tolist() for n in sizes]
