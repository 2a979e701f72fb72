"""Axis: how many tokens of a row each layer and head keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from accel.ir.invariants import Invariant, Method

__all__ = ["EMPTY", "Base"]

EMPTY = -float(np.finfo(np.float32).max)  # the score of a slot that holds nothing


class Base(Method, ABC):
    """How many tokens to keep: a session calls `tokens` before each eviction; `heads` is traced into the graph.

    A budget that is a `Tables` (`ir/tables.py`) names its constants of the layer, vectors, as further parameters:
    arrays in `tokens` and `most` (both take all of them, as keywords), tensors in `heads`. `tokens` may also name
    `prompt`, how many of the tokens seen are of the prompt: all while it runs, and where it is not given.
    """

    observe: int = 0  # last queries that `heads` reads as `queries`
    adaptive: ClassVar[bool] = (
        False  # whether scores alone say how many stay; `tokens` is then the least
    )
    even: ClassVar[bool] = True  # whether each head of a layer keeps what `tokens` says
    level: ClassVar[bool] = (
        True  # whether the heads of a layer keep equally many; if not, each takes only what it keeps
    )
    across: Callable[..., Any] | None = None

    @property
    def breaks(self) -> frozenset[Invariant]:
        apart = frozenset({Invariant.HEADS_ALIKE, Invariant.HEADS_LEVEL})
        return frozenset({Invariant.TOKENS_CONTIGUOUS}) | (frozenset() if self.level else apart)

    @abstractmethod
    def tokens(self, seen: int, layer: int, layers: int) -> int:
        """Tokens that a head of the layer keeps, on average, of a row that has seen so many; 1 or more."""

    def most(self, tokens: int, heads: int) -> int:
        """The most that one of the layer's KV heads may keep where they keep so many on average."""
        return tokens

    def room(self, tokens: int, heads: int, slots: int) -> int:
        """The most that the layer's KV heads keep together, of so many slots of each. A budget with tables takes
        them as `most` does.
        """
        return heads * min(self.most(tokens, heads), slots)

    def heads(self, scores: Any, keep: Any) -> Any:
        """What each head keeps [B,G], out of scores [B,G,S] and the average `keep` [B] (tensors). Its parameters
        select its inputs, as a score's do. What ranks tokens takes the newest of equal scores. `ranks` [N] may be
        named, too: N is the most that a head can keep.
        """
        return keep[:, None].expand(-1, scores.shape[1])

    # across(scores, keep, positions, heads): which slots stay, bool [B,M], of all layers and heads side by side, out of
    # their scores and positions [B,M]; of `heads` heads, each keeps `keep` [B] on average. A budget that has it takes
    # all layers together, and its `heads` is not asked.
