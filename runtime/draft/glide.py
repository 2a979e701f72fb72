"""GliDe (arXiv:2402.02082): a small decoder drafts, which also reads keys and values of the target's last layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.runtime.draft._head import READS_KEYS, Head, head_folder
from accel.runtime.draft._published import config_of, glide_taps


@dataclass(frozen=True)
class Glide(Head):
    """`path`: the folder of a head, as `accel-compile train glide` writes one, or an artifact of one; it is copied into
    the artifact. Empty: the bundled head, for the bundled model. `weights`: the weight format of its products, a method
    of the axis `weights` (empty: unchanged).

    The head samples with each row's sampler. Drafted tokens see the keys and values of verified tokens alone.
    """

    path: str = ""
    weights: str = "int8"

    key = "glide"
    relies = READS_KEYS
    lacks = "targets whose last layers have latent, shared or recurrent state"

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        folder = self.draft_folder()
        assert folder is not None
        return glide_taps(config_of(folder, self.full_name), layers)
