"""Masked-diffusion models for tests, and decoding of one row as it is published, plainly and without accel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.compiler.facts_json import model_facts
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop._canvas import Guess
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard

VOCABULARY, MASK, LONGEST = 41, 40, 96
NEW, BLOCK = 21, 8  # tokens of an answer, whose last block is shorter


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
    is; where it is `whole`, an answer's `memory` and logits [K,V] of the block, too. `early(lead of masks,
    share of steps done)`: whether all that is left is filled at once; where it is `whole`, `slots` and `tokens` of
    the masks, too.
    """
    memory: dict[str, Any] = {}
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
            more = {"memory": memory, "slots": at[free].tolist(), "tokens": token[free].tolist()}
            lead = (top[:, 0] - top[:, 1])[free]
            if early is not None and early(
                lead, done, **(more if getattr(early, "whole", 0) else {})
            ):
                x[at[free]] = token[free]
                break
            here = sure[: stop - start], step, masks
            if getattr(stays, "whole", False):
                chosen = stays(*here, memory=memory, logits=scores[: stop - start])
            else:
                chosen = stays(*here)
            x[at[chosen]] = token[chosen]
            step += 1
        start = stop
    return x[len(prompt) :].tolist(), calls


def whole(rule):
    """Of a rule that takes more, see `official`."""
    rule.whole = True
    return rule


def entropies(logits, sure):
    """Of the masks [K], in nats; infinite where none is."""
    p = logits.softmax(-1)
    return -(p * (p + 1e-45).log()).sum(-1).masked_fill(sure == -torch.inf, torch.inf)


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


def eager(shift: bool) -> tuple[Filler, CompiledModel]:
    """A model and its eager build, for loops of any kind."""
    module = Filler(shift).eval()
    recipe = {"loop": {"use": "dllm-lowconf"}}
    return module, accel.optimize(module, recipe, target="eager", max_context=LONGEST)


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


def decoded(compiled: CompiledModel, use: str, given: Any, new: int = NEW, **options: Any) -> Any:
    """Tokens and graph calls of each prompt alone, and tokens of all together."""
    with with_loop(compiled, use, **options) as made:
        alone = [made.generate(prompt, max_new_tokens=new, eos=[]) for prompt in given]
        return (
            [out.tokens[0] for out in alone],
            [out.stats["calls"] for out in alone],
            made.generate(given, max_new_tokens=new, eos=[]).tokens,
        )


def driven(
    loop: Any, compiled: CompiledModel, prompt: Any, sampler: Any = None, new: int = NEW
) -> Any:
    """Tokens of one row, by a loop over a session of its own."""
    row = Row(
        np.array(prompt),
        sampler or Standard(),
        np.random.default_rng(0),
        limit=new,
        max_context=LONGEST,
    )
    with with_loop(compiled, "dllm-lowconf") as made, made.session() as own:
        list(loop.tokens(own, [row], DecodeContext()))
        assert own.lengths.tolist() == [len(prompt) + new - 1]
        return row.tokens, own.stats["calls"]


def guess_of(sure: Any) -> Guess:
    """What a call says that is as sure of slots 0 to n."""
    n = len(sure)
    return Guess(np.arange(n), np.arange(n), sure, sure, 1 - sure)
