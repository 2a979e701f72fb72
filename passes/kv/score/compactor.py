"""Compactor (arXiv:2507.08143): leverage of unrotated keys, and attention within chunks that sees later tokens, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.score import Base
from accel.passes.kv.score._leverage import finite, leverage, sketch
from accel.passes.kv.score._window import pooled

_RIDGE = 0.01


@dataclass(frozen=True)
class Compactor(Base):
    """`blending` times the leverage of a key, plus the attention to it times the norm of its value; each with mean 0
    and deviation 1 over the tokens and heads of a row. `blending` below 0: the share of tokens that is evicted.

    Leverage: of centred keys before their rotation, times a random matrix of `sketch` columns (by `seed`). Attention:
    of all queries of `chunk` tokens to all their keys, without 1/sqrt(D), added up per key, a mean with both
    neighbours; a chunk that lies in two calls is two chunks. The first `sinks` and the last `recent` tokens are kept,
    and have no score; the last ones still attend within their chunk, since a call does not know that they are.

    The mean and deviation are of a row, not of a whole batch as in the release.
    """

    sinks: int = option(8, least=0)
    recent: int = option(4, least=0)
    chunk: int = option(256, least=1, most=1 << 16)
    sketch: int = option(48, least=1, most=256)
    blending: float = option(-1.0)
    seed: int = option(0, least=0)
    small: ClassVar[Mapping[str, Any]] = {
        "sinks": 2, "recent": 2, "chunk": 8, "sketch": 4,
        "blending": 0.35,  # at another budget the default ranks otherwise
    }  # fmt: skip

    def note(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """See Base: the attention to a token times the norm of its value."""
        drawn = chunk_attention(queries, keys, positions, self.sinks, self.chunk)  # [B,G,T]
        weighed: Tensor = (drawn * values.float().norm(dim=-1)).transpose(1, 2)
        return weighed

    def __call__(
        self,
        unrotated_keys: Tensor,
        notes: Tensor,
        values: Tensor,
        positions: Tensor,
        seen: Tensor,
        keep: Tensor,
    ) -> Tensor:
        scored = (positions >= self.sinks) & (positions < (seen - self.recent)[:, None, None])
        real = finite(scored, unrotated_keys, values, notes[..., None])
        weight = real[..., None].float()
        keys = unrotated_keys.float().masked_fill(~real[..., None], 0)
        centre = keys.sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)
        groups, width = keys.shape[1], keys.shape[3]
        rows = ((keys - centre) * weight) @ sketch(groups, width, self.sketch, self.seed, keys)
        outliers = standard(leverage(rows, _RIDGE).clamp(min=0), real)
        near = pooled(
            notes.masked_fill(~real, 0)[:, :, None], positions.where(scored, -1), 3, "mean"
        )
        attention = standard(near[:, :, 0], real)
        if self.blending < 0:
            tokens = (positions >= 0).sum(2, keepdim=True).clamp(min=1)
            share = (1 - keep[:, None, None] / tokens).clamp(min=0)
            scores = share * outliers + attention
        else:
            scores = self.blending * outliers + attention
        return scores.masked_fill(scored & ~real, float("nan"))


def chunk_attention(
    queries: Tensor, keys: Tensor, positions: Tensor, first: int, chunk: int
) -> Tensor:
    """The attention that a call's keys [B,G,T,D] draw of the queries [B,H,T,D] of their chunk, before and behind them:
    a sum over queries, a mean over the heads of a group, [B,G,T]. `positions` [B,T]; chunks start at `first`.
    """
    grouped = queries.float().unflatten(1, (keys.shape[1], -1))
    number = (positions - first).div(chunk, rounding_mode="floor")
    there = positions >= first
    same = (number[:, :, None] == number[:, None]) & there[:, :, None] & there[:, None]
    hidden = ~same[:, None, None]  # [B,1,1,T,T]
    dots = grouped @ keys.float()[:, :, None].transpose(3, 4)
    weights = dots.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1)
    drawn: Tensor = weights.masked_fill(hidden, 0).sum(3).mean(2)
    return drawn


def standard(x: Tensor, real: Tensor) -> Tensor:
    """x [B,G,S] with mean 0 and deviation 1 over the real ones of a row."""
    count = real.sum((1, 2), keepdim=True)
    x = x.masked_fill(~real, 0)
    off = (x - x.sum((1, 2), keepdim=True) / count.clamp(min=1)).masked_fill(~real, 0)
    deviation = (off.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    found: Tensor = off / deviation.clamp(min=1e-6)
    return found
