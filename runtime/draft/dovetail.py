"""Dovetail (arXiv:2412.18934): layers draft by a gated fusion of a token's embedding and the last hidden state of the
target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.ir.taps import FINAL
from accel.runtime.draft._head import Head, head_folder


@dataclass(frozen=True)
class Dovetail(Head):
    """`path`: the folder of a head, from `accel-compile train dovetail`, or an artifact of one; it is copied into the
    artifact. Empty: the bundled head, for the bundled model. `weights`: the weight format of its products, a method of
    the axis `weights` (empty: unchanged).

    Embedding and output head are the target's. A tree is that of EAGLE-2, with fewer nodes.
    """

    path: str = ""
    weights: str = "int8"

    key = "dovetail"
    lacks = "a draft on another device than the target's: the head runs where the model does"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)
