"""Input-guided aggressive decoding (arXiv:2205.10350): while the output follows the input, as where a text is
edited, the input's next tokens are the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.errors import RecipeError
from accel.runtime.draft import Base, Drafter
from accel.runtime.draft._match import ends
from accel.runtime.ints import Ints
from accel.runtime.tree import Tree


@dataclass(frozen=True)
class Iad(Base):
    """The input is the prompt. The newest token says where in it the output is; where it occurs more than once,
    the newest two do, and so on up to `ngram`; then there is no draft.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise RecipeError(f"draft.iad: ngram is {self.ngram}; give at least 1")

    def begin(self, prompt: Ints) -> Drafter:
        return _Aligned(self.ngram, prompt)


@dataclass(frozen=True)
class _Aligned(Drafter):
    ngram: int
    source: Ints

    def draft(self, seen: Ints, limit: int) -> Tree:
        for size in range(1, min(self.ngram, seen.size) + 1):
            found = ends(self.source, seen[-size:])
            if found.size == 1:
                return Tree.chain(self.source[found[0] : found[0] + limit])
            if not found.size:
                break
        return Tree.chain([])
