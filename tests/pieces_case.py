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


def blended(
    module: Any, tokens: Any, parts: list[Any], layer: int, stale: Any
) -> tuple[Any, dict[int, Any]]:
    """Logits [V] of the last token, by transformers' own model: the layers behind `layer` read of these parts what the
    stored prompts have alone at these positions, but for what `stale(deviation [n], drawn [n]) -> bools` says of the
    reused tokens in their order, by layer `layer`. And what these layers read then: keys and values by layer.
    """
    stored: list[dict[int, Any]] = []
    for p in parts:
        at = torch.arange(len(p.tokens))[None] + p.start - p.offset
        stored.append({})

        def keep(i: int, query: Any, key: Any, value: Any, scale: float) -> Any:
            stored[-1][i] = key, value
            return key, value

        ran(module, p.tokens, keep, position_ids=at)
    reused = np.concatenate([np.arange(p.start, p.start + p.count) for p in parts])
    fixed: Any = None
    merged: dict[int, Any] = {}

    def read(i: int, query: Any, key: Any, value: Any, scale: float) -> Any:
        nonlocal fixed
        pairs = list(zip(parts, stored, strict=True))
        old = [
            torch.cat([held[i][j][:, :, p.offset : p.offset + p.count] for p, held in pairs], 2)
            for j in range(2)
        ]
        if i == layer:
            gone = [
                ((new[:, :, reused] - was) ** 2).sum((0, 1, 3))
                for new, was in zip((key, value), old, strict=True)
            ]
            asks = np.setdiff1d(np.arange(len(tokens)), reused)
            paid = probabilities(query, key, scale)[0][:, asks][:, :, reused].sum((0, 1))
            fixed = ~np.asarray(stale((gone[0] + gone[1]).numpy(), paid.numpy()))
        elif i > layer:
            key, value = key.clone(), value.clone()
            key[:, :, reused[fixed]] = old[0][:, :, fixed]
            value[:, :, reused[fixed]] = old[1][:, :, fixed]
            merged[i] = key, value
        return key, value

    return ran(module, tokens, read), merged


def repaired(
    module: Any, tokens: Any, merged: dict[int, Any], layer: int, again: Any
) -> tuple[Any, dict[int, Any]]:
    """The same of one token more, before which those of `again(share [T]) -> positions` are computed again, by its
    attention at `layer`. `merged`: what the layers behind read before.
    """
    places: Any = None
    made: dict[int, Any] = {}

    def read(i: int, query: Any, key: Any, value: Any, scale: float) -> Any:
        nonlocal places
        if i == layer:
            share = probabilities(query, key, scale)[0][:, -1].mean(0).numpy()
            places = [*again(share), len(tokens) - 1]
        elif i > layer:
            new = []
            for old, fresh in zip(merged[i], (key, value), strict=True):
                new.append(torch.cat([old, fresh[:, :, -1:]], 2))
                new[-1][:, :, places] = fresh[:, :, places]
            key, value = made[i] = new
        return key, value

    return ran(module, tokens, read), made


def ran(module: Any, tokens: Any, read: Any, **more: Any) -> Any:
    """Logits [V] of the last token where each layer's attention reads the keys and values that `read` makes of the
    layer, its queries, keys, values and scale.
    """
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(part: Any, query: Any, key: Any, value: Any, *rest: Any, **told: Any) -> Any:
        scale = told.get("scaling") or query.shape[-1] ** -0.5
        key, value = read(part.layer_idx, query, key, value, scale)
        return plain(part, query, key, value, *rest, **told)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        with torch.no_grad():
            out = module(torch.tensor(tokens)[None], use_cache=False, **more)
            return out.logits[0, -1].numpy()
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
