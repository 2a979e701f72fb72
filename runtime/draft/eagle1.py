"""EAGLE (arXiv:2401.15077): a layer drafts by the last hidden state of the target, which it also guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.ir.taps import FINAL
from accel.runtime.draft._head import Head, head_folder


@dataclass(frozen=True)
class Eagle1(Head):
    """`path`: the folder of a head, in its authors' layout or that of speculators, or an artifact of one; it is copied
    into the artifact. Empty: the bundled head, for the bundled model. `weights`: the weight format of its products, a
    method of the axis `weights` (empty: unchanged).

    Embedding and output head are the target's. EAGLE-2 is such a head with `tree = eagle-tree`.
    """

    path: str = ""
    weights: str = "int8"

    key = "eagle1"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)
