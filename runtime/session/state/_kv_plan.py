"""How a session compresses its cache: what the recipe and the facts of its build say of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.axis import host_method
from accel.ir.kv import KvFacts
from accel.ir.state import Part, StateValue
from accel.runtime.backends.buffers import kept_heads, stages_of
from accel.runtime.kv.budget import Base as Budget
from accel.runtime.kv.when import Base as When


@dataclass(frozen=True)
class KvPlan:
    """How the cache is compressed: the recipe's `budget` and `when`, the facts that its build left, and what the layout
    of the state says.

    heads: KV heads of each layer that is compressed. mass: names of the state that scores add up. stages: how many
    stages of prompt pruning are before each layer. ragged: layers whose heads keep unequal numbers. notes: whether a
    score notes something of each token.
    """

    budget: Budget
    when: When
    facts: KvFacts
    heads: dict[int, int]
    mass: Sequence[str] = ()
    stages: Mapping[int, int] = field(default_factory=dict)
    ragged: frozenset[int] = frozenset()
    notes: bool = False

    @property
    def counts(self) -> bool:
        """Whether queries leave a mark that cannot be taken back."""
        return bool(self.mass)

    @cached_property
    def tables(self) -> list[dict[str, npt.NDArray[Any]]]:
        """The budget's constants, by name, of each layer."""
        return [{n: np.array(values) for n, values in one.items()} for one in self.facts.tables]

    def tokens(self, seen: int, layer: int, prompt: int) -> int:
        """Tokens that a head of the layer, one of `heads` in their order, keeps on average, where `prompt` of those
        seen are the prompt's.
        """
        told: dict[str, Any] = {**self._table(layer)}
        if _by_prompt(type(self.budget)):
            told["prompt"] = prompt
        return self.budget.tokens(seen, layer, len(self.heads), **told)

    def most(self, tokens: int, layer: int, heads: int) -> int:
        """The most that one of its heads keeps."""
        return self.budget.most(tokens, heads, **self._table(layer))

    def room(self, tokens: int, layer: int, heads: int, slots: int) -> int:
        """The most that its heads keep together, of so many slots of each."""
        return self.budget.room(tokens, heads, slots, **self._table(layer))

    def _table(self, layer: int) -> Mapping[str, npt.NDArray[Any]]:
        return self.tables[layer] if self.tables else {}


@cache
def _by_prompt(budget: type[Budget]) -> bool:
    return "prompt" in inspect.signature(budget.tokens).parameters


def kv_plan(
    tables: Mapping[str, Any], facts: KvFacts | None, state: Sequence[StateValue]
) -> KvPlan | None:
    """None where the recipe keeps everything. `state`: its layout."""
    if facts is None:
        return None
    return KvPlan(
        host_method(tables, "kv.budget", "uniform"),
        host_method(tables, "kv.when", "prompt"),
        facts,
        kept_heads(state),
        [s.name for s in state if s.part is Part.MASS],
        stages_of(state),
        frozenset(s.layer for s in state if s.ragged and s.layer is not None),
        any(s.part is Part.NOTE for s in state),
    )
