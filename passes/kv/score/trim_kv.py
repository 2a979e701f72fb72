"""TRIM-KV (arXiv:2512.03324): a trained retention gate predicts, when a token is cached, how fast its
importance decays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.passes.kv.score import Base
from accel.passes.trained import Trained


@dataclass(frozen=True)
class TrimKV(Trained, Base):
    """The score of a token for the query n tokens behind it is n log(beta), with beta in (0, 1) predicted from the
    hidden state of its key; that of the next query counts. No token is kept for its position, the newest neither.
    """

    key: ClassVar[str] = "trim-kv"
    when: ClassVar[str] = "every"

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"w1": (-1, width), "b1": (-1,), "w2": (heads, -1), "b2": (heads,)}

    def note(self, hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:  # type: ignore[override]
        """log(beta), [B,T,E] -> [B,T,G]."""
        return F.logsigmoid(F.linear(F.silu(F.linear(hidden, w1, b1)), w2, b2))

    def __call__(self, notes: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        return (seen[:, None, None] - positions) * notes

    # Training (api/compiler/train): attention forgets as the cache will.

    def start(
        self, width: int, heads: int, inner: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Gates with beta close to 1: after 100 tokens half of one is left."""
        w1 = torch.randn(inner, width, generator=generator) * width**-0.5
        w2 = torch.randn(heads, inner, generator=generator) * 0.1 * inner**-0.5
        return {"w1": w1, "b1": torch.zeros(inner), "w2": w2, "b2": torch.full((heads,), 5.0)}

    def soften(self, notes: Tensor, after: Tensor) -> Tensor:
        """What is added to the scores of attention, [B,G,T,S]: notes [B,G,S] of keys that lie
        `after` [B,T,S] tokens before their query.
        """
        return after[:, None].clamp(min=0) * notes[:, :, None]

    def excess(self, notes: Tensor, after: Tensor, budget: int) -> Tensor:
        """How far what is held goes beyond the budget, as a share of the tokens seen; a mean."""
        held = (
            torch.exp(self.soften(notes, after)).masked_fill((after < 0)[:, None], 0).sum(-1)
        )  # [B,G,T]
        seen = (after >= 0).sum(-1).clamp(min=1)[:, None]
        return ((held - budget).clamp(min=0) / seen).mean()
