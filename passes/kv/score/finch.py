"""FINCH (TACL 2024, "Prompt-guided Key-Value Cache Compression"): keep what the question attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.passes.kv.score import Base
from accel.passes.kv.score._window import observed


@dataclass(frozen=True)
class Finch(Base):
    """Attention of the question's tokens, each times the number of keys that it sees, a mean over them and the heads of
    the group. The question stays. `Session.mark` says where it begins; where it does not, it is the last `window`
    tokens. Of a longer question the last `window` tokens vote.

    kvpress' number of keys is one lower. The paper repeats the question behind each chunk of a long prompt; here the
    prompt is whole before it is compressed.
    """

    window: int = count(64, most=1024)
    small: ClassVar[Mapping[str, Any]] = {"window": 4}

    def __post_init__(self) -> None:
        if self.window < 1:
            raise RecipeError(f"kv.score.finch: window is {self.window}; give at least 1")

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def __call__(
        self,
        queries: Tensor,
        query_positions: Tensor,
        keys: Tensor,
        positions: Tensor,
        seen: Tensor,
        question: Tensor,
        scale: float,
    ) -> Tensor:
        there = (question >= 0) & (question < seen)
        first = torch.where(there, question, (seen - self.window).clamp(min=0))
        voting = query_positions.masked_fill(query_positions < first[:, None], -1)
        probs = observed(queries, voting, keys, positions, scale)  # [B,G,R,W,S]
        seen_by = (positions[:, :, None] >= 0) & (
            positions[:, :, None] <= voting[..., None, :, None]
        )
        weighted = probs * self.normalizer(seen_by.sum(3))[:, :, None, :, None]
        number = (voting >= 0).sum(1).clamp(min=1)[:, None, None]
        worth = weighted.sum(3).mean(2) / number
        late = positions >= first[:, None, None]
        return torch.where(late, seen[:, None, None] + 1.0, worth)  # a mean is at most `seen`

    def normalizer(self, keys: Tensor) -> Tensor:
        """What the attention of a query that sees so many keys is multiplied by."""
        return keys
