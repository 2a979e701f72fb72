"""Axis: what becomes of the tokens that do not stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from accel.ir.invariants import Invariant, Method

__all__ = ["Base", "Parts"]

Parts = dict[str, tuple[str, int]]  # name -> (dtype, numbers of a token); the first is named ""


class Base(Method):
    """A pure function of tensors, traced into the graph: the values that are kept.

    Given `keys`, `values` [B,G,S,D] of all slots, `positions` [B,G,S] (-1: nothing there), and of those
    that stay `chosen` [B,G,N] (slots; which of them are real: `real` [B,G,N]), it gives the values
    [B,G,N,D] that are stored with the keys of the chosen slots. A method that `demotes` keeps the others too, in
    the `parts` that it makes of D numbers: `encode` [B,G,S,D], and `decode` them again.
    """

    grade: ClassVar[str] = "approximate"
    merges: ClassVar[bool] = True  # whether values change, so that they must not be keys too
    demotes: ClassVar[bool] = False  # whether tokens that do not stay go on in another form

    breaks = frozenset({Invariant.TOKENS_CONTIGUOUS})

    parts: Callable[[int], Parts]
    encode: Callable[[Tensor], dict[str, Tensor]]
    decode: Callable[[dict[str, Tensor], int], Tensor]

    __call__: Callable[..., Tensor]
