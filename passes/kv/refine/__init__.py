"""Axis: what a token's score becomes beside the other tokens. A chain of methods after any score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import Axis
from accel.ir.errors import RecipeError, shown
from accel.ir.invariants import Invariant, Method
from accel.passes.kv.inputs import parameters, relied

__all__ = ["Base"]


@dataclass(frozen=True)
class Base(Method):
    """Scores after scores: a pure function of tensors, traced into the graph. The parameter names select its inputs:
    those of `kv.score`, and

    | parameter | |
    |---|---|
    | `scores` [B,G,S] | what came before; finite. Empty slots and tokens without a finite score have the lowest |
    | `protected` [B,G,S] | bool: tokens that stay whatever their score, the score's `sinks` and `recent` |
    | `keep` [B] | tokens that a head keeps, on average |
    | `counts` [B,G] | tokens that each head keeps, by the scores before any refine |
    | `ranks` [N] | 0..N-1, N: the largest number of tokens that a head may keep |
    | `output` [H,D,E] | the layer's output projection |

    It returns scores [B,G,S]; those of protected tokens and empty slots are ignored. A token of -inf goes even where
    there is room, unless it is protected. `then`: the table of the next method of the chain, with `use` and options, or
    none.

    Where `reuse` is N, layers 0, N, 2N, … of those that evict choose, and the N - 1 layers after each keep tokens of
    the same positions, head by head; their scores are not computed.
    """

    then: Any = None

    grade: ClassVar[str] = "approximate"

    reuse: ClassVar[int] = 1  # so many neighbouring layers keep what the first of them does

    __call__: ClassVar[Callable[..., Tensor]]
    first: ClassVar[Callable[..., Tensor] | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.then is None or isinstance(self.then, Base):
            return
        table = self.then
        if not isinstance(table, Mapping) or not isinstance(table.get("use"), str):
            raise RecipeError(
                f"kv.refine: then is {shown(table)}; give the table of the next method, with its `use`"
            )
        options = {str(name): value for name, value in table.items() if name != "use"}
        object.__setattr__(self, "then", Axis("kv.refine", __name__).build(table["use"], **options))

    @property
    def chain(self) -> tuple[Base, ...]:
        """This method and those after it."""
        return (self, *(self.then.chain if isinstance(self.then, Base) else ()))

    @property
    def reads(self) -> frozenset[str]:
        """The names of what the chain goes by."""
        return frozenset(name for function in self.functions for name in parameters(function))

    @property
    def functions(self) -> list[Callable[..., Tensor]]:
        """What the methods of the chain compute."""
        return [f for one in self.chain for f in (one, one.first) if f is not None]

    @property
    def shared(self) -> int:
        """How many neighbouring layers keep what the first of them does: the most that a method of the chain says."""
        return max(one.reuse for one in self.chain)

    @property
    def relies(self) -> frozenset[Invariant]:
        slots = {Invariant.UNIFORM_SLOTS} if self.shared > 1 else set()
        return relied(self.reads)[0] | slots

    @property
    def breaks(self) -> frozenset[Invariant]:
        return relied(self.reads)[1] | {Invariant.TOKENS_CONTIGUOUS}

    # first(…) -> [B,G,S], 0 to 1, its parameters as above: tokens above 0 stay before all others, protected ones too,
    # the largest first.
