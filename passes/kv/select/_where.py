"""What tokens of a call see, and so may choose of the pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.ops.attention import Mask
from accel.ir.ops.choice import best_pages, pages_before


@dataclass(frozen=True)
class Form(Mask):
    """What a query sees, and what makes logits of its products with keys: a scale, and a cap where it is not 0."""

    scale: float = 1.0
    softcap: float = 0.0

    def logits(self, products: Tensor) -> Tensor:
        """Of products of any shape; the lowest number is not put where nothing is seen."""
        logits = products * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


@dataclass(frozen=True)
class Where:
    """Positions of a call [B,T] and in the slots [B,C], the call's first slots [B], and what its tokens see."""

    q_pos: Tensor
    k_pos: Tensor
    slots: Tensor
    mask: Mask

    @property
    def tokens(self) -> int:
        """Tokens of the call, T."""
        return self.q_pos.shape[1]

    def seen(self, pages: int, page: int) -> Tensor:
        """Which of so many pages each token may choose, bool [B,1,T,pages]."""
        return pages_before(self.q_pos, self.k_pos, self.slots, pages, page, self.mask)[0]

    def best(self, worth: Tensor, count: int, page: int) -> Tensor:
        """worth [B,G,T,N] -> each token's own page, then the best of those that it may choose (`best_pages`)."""
        call, mask = (self.q_pos, self.k_pos, self.slots), self.mask
        found: Tensor = best_pages(worth, *call, count, page, mask.kind, mask.size)
        return found
