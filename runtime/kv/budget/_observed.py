"""What attention is to find while a table is measured."""

from __future__ import annotations

from typing import Any


def right_places(tokens: Any) -> Any:
    """For each of T + 1 tokens but the last: which ones hold the next token, behind a copy of this one [T,T]."""
    now, following = tokens[:-1], tokens[1:]
    holds = following[:, None] == now
    before = holds & False
    before[:, 1:] = now[:, None] == now[:-1]
    return holds & before & (before.new_ones(before.shape).long().tril() > 0)
