"""How a session compresses its cache: what the recipe and the facts of its build say of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.axis import host_method
from accel.ir.state import Part
from accel.runtime.backends.buffers import kept_heads, stages_of
from accel.runtime.kv.budget import Base as Budget
from accel.runtime.kv.when import Base as When


@dataclass(frozen=True)
class KvPlan:
    """How the cache is compressed: out of a recipe, by `kv_plan`.

    heads: KV heads of each layer that is. observe: last queries that scoring takes. counts: whether
    queries leave a mark that cannot be taken back. flush, sinks: where nothing is dropped, tokens of a block, and
    those before all blocks (`runtime/session/state/block_codec.py`).
    lookahead, repeats: see `KvFacts`. mass: names of the state that
    scores add up. tables: the budget's constants, by name, of each layer. marks, moves: see `KvFacts`.
    stages: how many stages of prompt pruning are before each layer. ragged: layers whose heads keep unequal numbers.
    notes: whether a score notes something of each token.
    """

    budget: Budget
    when: When
    heads: dict[int, int]
    observe: int
    counts: bool
    flush: int = 0
    lookahead: int = 0
    repeats: bool = False
    mass: Sequence[str] = ()
    tables: Sequence[Mapping[str, npt.NDArray[Any]]] = ()
    stages: Mapping[int, int] = field(default_factory=dict)
    marks: Sequence[str] = ()
    moves: bool = False
    sinks: int = 0
    ragged: frozenset[int] = frozenset()
    notes: bool = False

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


def kv_plan(tables: Mapping[str, Any], kv: Any, state: Sequence[Any]) -> KvPlan | None:
    """None where the recipe keeps everything. `kv`: the facts that the build left, `state` its layout."""
    if kv is None:
        return None
    return KvPlan(
        host_method(tables, "kv.budget", "uniform"),
        host_method(tables, "kv.when", "prompt"),
        kept_heads(state),
        kv.observe,
        any(s.part is Part.MASS for s in state),
        kv.flush,
        kv.lookahead,
        kv.repeats,
        [s.name for s in state if s.part is Part.MASS],
        [{name: np.array(values) for name, values in one.items()} for one in kv.tables],
        stages_of(state),
        kv.marks,
        kv.moves,
        kv.sinks,
        frozenset(s.layer for s in state if s.ragged),
        any(s.part is Part.NOTE for s in state),
    )
