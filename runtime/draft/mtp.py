"""Next-token layers (multi-token prediction, arXiv:2412.19437): a layer that was trained with the target, and lies in
its checkpoint, drafts by the target's last hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.ir.taps import FINAL
from accel.runtime.draft._head import Head, head_folder


@dataclass(frozen=True)
class Mtp(Head):
    """`path`: a model's directory with next-token layers, the folder of one layer by itself (of speculators), or an
    artifact of one; it is copied into the artifact. Empty: the directory that the target is built from. `weights`: as
    of `eagle3`.

    The first of the layers drafts all tokens, each from its own output for the one before.
    """

    path: str = ""
    weights: str = "int8"

    within = True
    lacks = "a layer of its own for each drafted token, where a checkpoint has several"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path)

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)
