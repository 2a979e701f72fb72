"""Medusa (arXiv:2401.10774): heads on the target's last hidden state draft the next tokens independently, all in one
call; a tree has the likeliest of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.draft._independent import IndependentHead


@dataclass(frozen=True)
class Medusa(IndependentHead):
    """`path`: the folder of heads in their authors' layout, or an artifact of them; it is copied into the artifact.
    Empty: the bundled heads, for the bundled model. `weights`: the weight format of their products, a method of the
    axis `weights` (empty: unchanged).

    A draft is as deep as there are heads, whatever the tree. Heads without words of their own say their tokens by the
    output head of the directory that the target is built from.
    """

    key = "medusa"
