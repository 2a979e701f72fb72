"""Axis: what happens to tokens that are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from accel.ir.invariants import Invariant, Method

__all__ = ["Base", "Parts"]

Parts = dict[str, tuple[str, int]]  # name -> (dtype, numbers of a token); the first is named ""


class Base(Method):
    """What happens to evicted tokens: a pure function of tensors, traced into the graph, that returns the
    values to store.

    Inputs: `keys`, `values` [B,G,S,D] of all slots; `positions` [B,G,S] (-1: empty); `chosen` [B,G,N], the slots of
    the kept tokens, and `real` [B,G,N], which of them are valid; `scores` [B,G,S], and the inputs of scores. Output:
    values [B,G,N,D], stored with the keys of the chosen slots; where a method `moves`, these are rotated to positions
    0..N-1, and the session goes on from there. A method that `demotes` also keeps the other tokens, as
    `parts` of D numbers, with `encode` [B,G,S,D] and `decode`.
    """

    grade: ClassVar[str] = "approximate"
    merges: ClassVar[bool] = True  # whether values change, so that they must not be keys too
    adds: ClassVar[bool] = False  # whether values are added up, so that they are no averages
    demotes: ClassVar[bool] = False  # whether tokens that do not stay go on in another form

    moves: ClassVar[bool] = False  # whether tokens that stay take positions from 0 on

    breaks = frozenset({Invariant.TOKENS_CONTIGUOUS})

    parts: Callable[[int], Parts]
    encode: Callable[[Tensor], dict[str, Tensor]]
    decode: Callable[[dict[str, Tensor], int], Tensor]

    __call__: Callable[..., Tensor]
