"""Speculative decoding with a draft model (arXiv:2211.17192), which has its own cache; models with different
tokenizers exchange text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from accel.ir.errors import InputError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.recipe import Recipe
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._beside import Beside
from accel.runtime.draft._by_levels import ByLevels
from accel.runtime.draft._by_logits import ByLogits
from accel.runtime.draft._texts import ByText
from accel.runtime.inputs.text import same_tokens
from accel.runtime.speculation.follow import Follower
from accel.runtime.speculation.guard import steps_of
from accel.runtime.speculation.heir import Heir
from accel.runtime.tree import Tree

TOKEN, LEVEL = (
    5e-5,
    4e-4,
)  # seconds that a drafted token, or a level of a tree, takes beside the draft model's call
OWN = "draft"  # of accel.reference: the draft model of the bundled one
SELF = "self"  # the path of the model itself


@dataclass(frozen=True)
class Model(Base):
    """`path`: an artifact, or a Hugging Face directory or a GGUF file, which is compiled in the same build; either is
    copied into the artifact.
    Empty: the bundled draft model, for the bundled model. It samples with each row's sampler; with a
    different tokenizer it decodes greedily. "self": the model itself by another `recipe` (a name, or the path of a
    TOML file; by default `base`), over the same weights.

    `accel-compile train distillspec` tunes it to its target (DistillSpec, arXiv:2310.08461), and `train adaspec` by the
    tokens that it can still learn (AdaSPEC, arXiv:2510.19779).

    `weights`: the weight format of a Hugging Face directory, a method of the axis `weights` (empty:
    unchanged). With 8 bits
    nearly as many drafted tokens are accepted, at less memory and time; the output stays exact.
    """

    path: str = ""
    weights: str = "int8"
    recipe: str = ""

    asks = {"tree": "chain"}
    provides = frozenset({Invariant.DRAFT_MODEL, Invariant.PROBABILITIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe and self.path != SELF:
            raise RecipeError(
                f'{self.full_name}: recipe = {self.recipe!r} is of path = "{SELF}", the model itself by another '
                f'recipe; leave it out, or give path = "{SELF}"'
            )

    def draft_recipe(self) -> Recipe | None:
        return Recipe.load(self.recipe or "base") if self.path == SELF else None

    def draft_folder(self) -> Path | None:
        if self.path == SELF:
            return None
        return Path(self.path or str(files("accel.reference") / OWN)).expanduser()

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        draft_model = None if context.model is None else context.model.draft_model
        if context.model is None or draft_model is None:
            raise InputError(
                "draft.model: this model was built without its draft model; build it again"
            )
        branches = context.methods["tree"].branches
        known, here, there = context.costs, context.model.tokenizer, draft_model.tokenizer
        count, draft_cost, reading = len(rows), 0.0, 0.0
        if known:
            host = (LEVEL if branches else TOKEN) / known.seconds[0]
            draft_cost = host + steps_of(draft_model.costs, count, known, count)
            reading = steps_of(
                draft_model.costs, sum(row.prompt.size for row in rows), known, count
            )
        if here is not None and there is not None and not same_tokens(here, there):
            if branches:
                raise InputError(
                    "draft.model: the draft model has another tokenizer, which supports chains "
                    "only; build with tree = chain"
                )
            return ByText(draft_model, rows, here, there, draft_cost, reading)
        follower = (
            Heir(draft_model, rows, session, branches)
            if self.path == SELF
            else Follower(draft_model, len(rows), branches)
        )
        return self._drafter(branches, follower, rows, context, session.vocab_size, draft_cost)

    def _drafter(self, branches: bool, *args: Any) -> Drafters:
        """A drafter of trees, or of chains."""
        return (ByLevels if branches else Chains)(*args)


class Chains(Beside, ByLogits):
    """Drafts for rows whose tokens are the draft model's own."""

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self.begin(limits)
        return super().draft(limits, more)

    def first(self, rows: list[int]) -> Logits:
        return self.follow(rows)

    def further(self, tokens: dict[int, int]) -> Logits:
        return self._follower.run({i: np.array([token]) for i, token in tokens.items()})
