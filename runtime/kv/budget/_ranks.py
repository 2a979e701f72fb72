"""The order of scores."""

from __future__ import annotations

from typing import Any


def ranks(scores: Any, positions: Any) -> Any:
    """The place of each along the last axis, the highest first, of equal scores the newest."""
    newest = positions.sort(stable=True, dim=-1, descending=True).indices
    best = scores.gather(-1, newest).sort(stable=True, dim=-1, descending=True).indices
    return newest.gather(-1, best).sort(-1).indices
