"""Models that reuse parts of prompts, and the same done to transformers' own attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.compiled import CompiledModel

from .prefill_case import built

LEAST = 4
CHUNKS = np.random.default_rng(5).integers(3, 50, (3, 14))
QUESTION = np.random.default_rng(6).integers(3, 50, 5)


def reusing(use: str, name: str = "llama", target: str = "eager", **options: Any) -> Any:
    """A model of three layers whose store is empty."""
    table = {"use": use, "least": LEAST, "tokens": 4096, **options}
    made = built(name, target, {"kv.reuse": table})
    if target != "eager":
        return made
    engine = EagerBackend(made.program)
    return CompiledModel(engine, made.facts, recipe=made.recipe, program=made.program)


def put(start: int, tokens: Any, offset: int = 0, count: int | None = None) -> SimpleNamespace:
    """`count` of a stored prompt's tokens, from `offset` on, lie at `start` of another."""
    count = len(tokens) - offset if count is None else count
    return SimpleNamespace(start=start, tokens=tokens, offset=offset, count=count)


def blended(module: Any, tokens: Any, parts: list[Any], layer: int, stale: Any) -> Any:
    """Logits [V] of the last token, by transformers' own model: the layers behind `layer` read of these parts what the
    stored prompts have alone at these positions, but for what `stale(deviation [n], drawn [n]) -> bools` says of the
    reused tokens in their order, by layer `layer`.
    """
    plain, stored = ALL_ATTENTION_FUNCTIONS["sdpa"], []
    reused = np.concatenate([np.arange(p.start, p.start + p.count) for p in parts])
    fixed: Any = None

    def spy(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        stored[-1].append((key, value))
        return plain(module, query, key, value, *rest, **more)

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        nonlocal fixed
        old = [
            torch.cat([held[module.layer_idx][i][:, :, p.offset : p.offset + p.count]
                       for p, held in zip(parts, stored, strict=True)], 2)
            for i in range(2)
        ]  # fmt: skip
        if module.layer_idx == layer:
            gone = [
                ((new[:, :, reused] - was) ** 2).sum((0, 1, 3))
                for new, was in zip((key, value), old, strict=True)
            ]
            drawn = probabilities(query, key, more.get("scaling") or query.shape[-1] ** -0.5)
            asked = np.setdiff1d(np.arange(len(tokens)), reused)
            paid = drawn[0][:, asked][:, :, reused].sum((0, 1))
            fixed = ~np.asarray(stale((gone[0] + gone[1]).numpy(), paid.numpy()))
        elif module.layer_idx > layer:
            key, value = key.clone(), value.clone()
            key[:, :, reused[fixed]] = old[0][:, :, fixed]
            value[:, :, reused[fixed]] = old[1][:, :, fixed]
        return plain(module, query, key, value, *rest, **more)

    try:
        with torch.no_grad():
            ALL_ATTENTION_FUNCTIONS["sdpa"] = spy
            for p in parts:
                stored.append([])
                at = torch.arange(len(p.tokens))[None] + p.start - p.offset
                module(torch.tensor(p.tokens)[None], position_ids=at, use_cache=False)
            ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
            return module(torch.tensor(tokens)[None], use_cache=False).logits[0, -1].numpy()
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def probabilities(query: Any, key: Any, scale: float) -> Any:
    """Causal attention weights [B,H,T,T]."""
    count = query.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    hidden = torch.ones(count, count).triu(1).bool()
    return (query @ key.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def asked(model: Any, *prompts: Any) -> Any:
    """Logits [V] after the last of these prompts, each in a session of its own; and that session, closed."""
    for prompt in prompts:
        with model.session() as session:
            logits = session.prompt(np.asarray(prompt)[None])
    return logits[0, 0], session
