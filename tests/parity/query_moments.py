"""Operands of `query_mean`, `query_covariance` and `unrotated_keys`, of a layer of the Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.passes.kv._shared.rotation import Rotation
from accel.passes.kv.inputs.query_moments import future, moments

from .presses import Prompt


def tables(prompt: Prompt, rows: int = 2048) -> tuple[Tensor, Tensor]:
    """cos and sin [M,D/2]."""
    places = torch.arange(rows)[None]
    half = prompt.module.head_dim // 2
    cos, sin = prompt.module.rotary_emb(prompt.hidden, places)
    return cos[0, :, :half], sin[0, :, :half]


def to_come(method: object, prompt: Prompt) -> dict[str, Tensor]:
    """What `QueryMoments.read` gives."""
    rows, length = prompt.keys.shape[0], prompt.length
    queries = prompt.module.q_proj(prompt.hidden).unflatten(-1, (-1, prompt.module.head_dim))
    heads, width = queries.shape[2:]
    real = (torch.arange(length) >= method.sinks).expand(rows, -1)
    state = torch.zeros(rows, heads, width + 2, width)
    with torch.no_grad():
        state = moments(queries.transpose(1, 2), real, state)
        cos, sin = tables(prompt)
        mean = Rotation(None, cos, sin, False, 1.0, (None, None)).mean(method.future)
        found = future(state, torch.full((rows,), length), (cos, sin, *mean), False)
    return dict(zip(("query_mean", "query_covariance"), found, strict=True))


def back(prompt: Prompt) -> dict[str, Tensor]:
    """What `UnrotatedKeys.read` takes."""
    cos, sin = tables(prompt)
    return {"back_halves_cos": cos, "back_halves_sin": -sin}
