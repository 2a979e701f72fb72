"""The methods of one recipe that evict together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from accel.passes.kv.inputs import Input, inputs_of
from accel.passes.kv.keep import Base as Keep
from accel.passes.kv.refine import Base as Refine
from accel.passes.kv.score import Base as Score


class Budget(Protocol):
    """How many tokens each head keeps, where its layer keeps `keep` [B] per head: [B,G]."""

    observe: int
    level: bool

    @property
    def heads(self) -> Callable[..., Tensor]: ...
    def tokens(self, seen: int, layer: int, layers: int) -> int: ...
    @property
    def across(self) -> Callable[..., Tensor] | None: ...


@dataclass(frozen=True)
class Methods:
    """A score, a budget, what is kept of it, and maybe a chain that changes scores."""

    score: Score
    budget: Budget
    keep: Keep
    refine: Refine | None = None

    @property
    def methods(self) -> tuple[Any, ...]:
        """All of them, one after another."""
        return (self.score, self.budget, self.keep, *self.refines)

    @property
    def refines(self) -> tuple[Refine, ...]:
        """The chain that changes scores."""
        return self.refine.chain if self.refine is not None else ()

    @property
    def shared(self) -> int:
        """How many neighbouring layers keep what the first of them does."""
        return self.refine.shared if self.refine is not None else 1

    @property
    def inputs(self) -> list[Input]:
        """What they name, beside keys, values and positions."""
        refining = self.refine.functions if self.refine is not None else []
        functions: list[Callable[..., Any]] = [self.score, *refining, self.budget.heads, self.keep]
        if self.keep.absorbs:
            functions.append(self.keep.absorb)
        if self.keep.demotes and len(self.keep.tiers) > 1:
            functions.append(self.keep.tier)
        return inputs_of(functions)

    @property
    def across(self) -> Callable[..., Tensor] | None:
        """The budget's choice over all layers, where it has one."""
        return self.budget.across

    def ragged(self, heads: int) -> bool:
        """Whether a layer of so many KV heads stores what each keeps, and no more. One that demotes keeps all tokens
        of every head, in one form or the other.
        """
        return heads > 1 and not self.budget.level and not self.keep.demotes
