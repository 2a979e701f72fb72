"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.runtime.draft import Base, Drafter
from accel.runtime.inputs.ints import Ints
from accel.runtime.tree import Tree


@dataclass(frozen=True)
class Template(Base, Drafter):
    """What may follow: here, the newest token again."""

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        return self

    def draft(self, seen: Ints, limit: int) -> Tree:
        return Tree.chain(seen[-1:])
