"""Contiguous positions after eviction: tokens that stay take positions 0 to n - 1, as in FINCH (TACL 2024) and the
original StreamingLLM (arXiv:2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.passes.kv.keep import Base


@dataclass(frozen=True)
class KeyRerotate(Base):
    """Tokens that are not kept are removed; the keys of the others are rotated to their places in the cache, which the
    next token follows. So a session holds `n` tokens and no position exceeds the budget and what came since.
    """

    merges: ClassVar[bool] = False
    moves: ClassVar[bool] = True

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))
