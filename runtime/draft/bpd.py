"""Blockwise parallel decoding (arXiv:1811.03115): heads on the target's last hidden state draft the next tokens
independently, all in one call; the target itself is the first of the block's heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.draft._independent import IndependentHead


@dataclass(frozen=True)
class Bpd(IndependentHead):
    """`path`: a folder that `accel-compile train bpd MODEL --out DIR` wrote, or an artifact of one; it is copied into
    the artifact. Empty: the bundled heads, for the bundled model. `weights`: as of `medusa`.

    Drafts stand where the rule says: with `verify = top-beta` those among the `beta` best of the model (approximate).
    """

    key = "bpd"
    lacks = "the relaxed rules by distance and by a least block size"
