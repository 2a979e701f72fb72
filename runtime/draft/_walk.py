"""Drafters of chains whose follower says one token after the other by the token before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft._by_logits import ByLogits
from accel.runtime.inputs.ints import Ints


class Walk(ByLogits):
    """follower: it has `begin` of rows' tokens, and `said` of tokens."""

    def __init__(
        self,
        follower: Any,
        rows: Sequence[Row],
        context: DecodeContext,
        vocab_size: int,
        draft_cost: float,
    ):
        super().__init__(rows, context, vocab_size, draft_cost)
        self._follower = follower

    @property
    def kv_bytes(self) -> int:
        return int(self._follower.kv_bytes)

    @property
    def joins(self) -> bool:
        return bool(self._follower.joins)

    def most(self, row: int, limit: int) -> int:
        return min(limit, int(self._follower.room(self.rows[row].seen.size)))

    def first(self, rows: list[int]) -> Logits:
        logits: Logits = self._follower.begin({i: self.rows[i].seen for i in rows})
        return logits

    def further(self, tokens: dict[int, int]) -> Logits:
        logits: Logits = self._follower.said(tokens)
        return logits

    def join(self, other: Self) -> None:
        super().join(other)
        self._follower.join(other._follower)

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._follower.leave(order)

    def close(self) -> None:
        self._follower.close()
