"""What tokens of a call see, and so may choose of the pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accel.ir.ops.attention import Form
from accel.ir.ops.choice import best_pages, pages_before


@dataclass(frozen=True)
class Where:
    """Positions of a call [B,T] and in the slots [B,C], the call's first slots [B], and what its tokens see."""

    q_pos: Tensor
    k_pos: Tensor
    slots: Tensor
    mask: Form

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
