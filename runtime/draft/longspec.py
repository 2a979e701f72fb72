"""LongSpec (arXiv:2502.17421): a layer drafts that attends to its newest tokens, and to keys and values of the target's
last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.runtime.draft._head import READS_KEYS, Head, head_folder
from accel.runtime.draft._published import glide_taps


@dataclass(frozen=True)
class Longspec(Head):
    """`path`: the folder of a head in its authors' layout, as `accel-compile train longspec` writes one, or an artifact
    of one; it is copied into the artifact. Empty: the bundled head, for the bundled model. `weights`: the weight format
    of its products, a method of the axis `weights` (empty: unchanged).

    Embedding and output head are the target's. The head samples with each row's sampler. Drafted tokens see the keys
    and values of verified tokens alone.
    """

    path: str = ""
    weights: str = "int8"

    key = "longspec"
    relies = READS_KEYS
    lacks = (
        "reading the target's cache in place: a copy of its last layer's keys and values grows with the context; and "
        "targets whose last layer has latent, shared or recurrent state"
    )

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        return glide_taps({}, layers)
