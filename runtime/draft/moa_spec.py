"""Mixture of Attentions (arXiv:2410.03804): a head drafts that sums up, token by token, keys and values of all layers
of its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.runtime.draft._head import READS_KEYS, Head, head_folder
from accel.runtime.draft._published import moa_taps


@dataclass(frozen=True)
class MoaSpec(Head):
    """`path`: the folder of a head, as `accel-compile train moa-spec` writes one, or an artifact of one; it is copied
    into the artifact. Empty: the bundled head, for the bundled model. `weights`: the weight format of its products, a
    method of the axis `weights` (empty: unchanged).

    Embedding and output head are the target's. The head samples with each row's sampler. Drafted tokens see the
    summaries of verified tokens alone.
    """

    path: str = ""
    weights: str = "int8"

    key = "moa-spec"
    relies = READS_KEYS
    lacks = (
        "drafting through the target's last layers; and targets with layers of latent, shared or recurrent state, or "
        "of several sizes"
    )

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        return moa_taps(layers)
