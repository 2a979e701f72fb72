"""TOVA (arXiv:2401.06104): keep the tokens that the newest query attends to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv._shared.slots import mean_of_heads
from accel.passes.kv.inputs.attends import Attends
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class TOVA(Base):
    """The attention of the last query, a mean over all heads of the layer, so all keep the same tokens. `recent`:
    number of newest tokens to keep; the paper has 0, kvpress 1.
    """

    recent: int = option(0, least=0)
    when: ClassVar[str] = "generated"

    @property
    def observe(self) -> int:  # type: ignore[override]
        return 1

    def __call__(
        self, queries: Tensor, query_positions: Tensor, positions: Tensor, attends: Attends
    ) -> Tensor:
        last = queries[:, :, -1:], query_positions[:, -1:]
        attention = attends(*last)[:, :, :, 0]  # [B,G,R,S]
        return mean_of_heads(attention.mean(2), positions)
