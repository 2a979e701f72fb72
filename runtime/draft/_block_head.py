"""Drafters that are heads of their target and draft a block in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.draft_head import DraftHead
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft import Base
from accel.runtime.draft._head import RELIES, head_folder
from accel.runtime.draft._published import config_of, dflash_taps
from accel.runtime.speculation.guard import steps_of


@dataclass(frozen=True)
class BlockHead(Base):
    """`path`: the folder of a head, in its authors' layout or that of speculators, or an artifact of one; it is copied
    into the artifact. `weights`: as of `eagle3`.
    """

    path: str = ""
    weights: str = "int8"

    embeds = head = blocks = True
    relies = RELIES | {Invariant.CHAINS}

    def draft_folder(self) -> Path | None:
        return head_folder(self.path)

    def taps(self, layers: int) -> Sequence[str]:
        folder = self.draft_folder()
        assert folder is not None
        return dflash_taps(config_of(folder, self.full_name))

    def cost(
        self, model: Any, head: DraftHead, rows: int, context: DecodeContext, host: float = 0.0
    ) -> float:
        """Of a drafted token, in plain steps of the target; 0 where nothing was measured. host: seconds beside the
        block's call.
        """
        known = context.costs
        if known is None:
            return 0.0
        calls = steps_of(model.costs, rows * head.block, known, rows) / head.block
        return calls + host / float(known.seconds[0])
