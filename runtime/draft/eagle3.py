"""EAGLE-3 (arXiv:2503.01840): a head of one layer drafts by hidden states of the target from three depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.runtime.draft._head import Head, head_folder
from accel.runtime.draft._published import config_of, eagle3_taps


@dataclass(frozen=True)
class Eagle3(Head):
    """`path`: the folder of a head, in its authors' layout or that of speculators, or an artifact of one; it is copied
    into the artifact. Empty: the bundled head, for the bundled model. `weights`: the weight format of its products, a
    method of the axis `weights` (empty: unchanged).

    The head samples with each row's sampler. Its own vocabulary may be smaller than the target's: other tokens are not
    drafted.
    """

    path: str = ""
    weights: str = "int8"

    key = "eagle3"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        folder = self.draft_folder()
        assert folder is not None
        return eagle3_taps(config_of(folder, self.full_name), layers)
