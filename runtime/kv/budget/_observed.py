"""Attention while a table is measured, and what it is to find."""

from __future__ import annotations

from typing import Any

from accel.ir.tables import Observed


def probabilities(x: Observed) -> Any:
    """The causal attention [B,G,R,T,T] of a layer's queries, by group of the KV head that they read."""
    grouped = x.queries.float().unflatten(1, (x.keys.shape[1], -1))
    logits = (grouped @ x.keys.float()[:, :, None].transpose(-1, -2)) * x.scale
    later = logits.new_ones(logits.shape[-2:]).triu(1) > 0
    return logits.masked_fill(later, -1e30).softmax(-1)


def right_places(tokens: Any) -> Any:
    """For each of T + 1 tokens but the last: which ones hold the next token, behind a copy of this one [T,T]."""
    now, following = tokens[:-1], tokens[1:]
    holds = following[:, None] == now
    before = holds & False
    before[:, 1:] = now[:, None] == now[:-1]
    return holds & before & (before.new_ones(before.shape).long().tril() > 0)
