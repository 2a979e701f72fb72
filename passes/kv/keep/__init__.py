"""Axis: what happens to tokens that are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from accel.ir.invariants import Invariant, Method

__all__ = ["Absorbed", "Base", "Parts"]

Absorbed = dict[str, tuple[int, ...]]  # name -> size, of each KV head
Parts = dict[str, tuple[str, int]]  # name -> (dtype, numbers of a token); the first is named ""


class Base(Method):
    """What happens to evicted tokens: a pure function of tensors, traced into the graph, that returns the
    values to store.

    Inputs: `keys`, `values` [B,G,S,D] of all slots; `positions` [B,G,S] (-1: empty); `chosen` [B,G,N], the slots of
    the kept tokens, and `real` [B,G,N], which of them are valid; `scores` [B,G,S], and the inputs of scores. Output:
    values [B,G,N,D], stored with the keys of the chosen slots; where a method `moves`, these are rotated to positions
    0..N-1, and the session goes on from there. A method that `demotes` also keeps the other tokens, as
    `parts` of D numbers, with `encode` [B,G,S,D] and `decode`.

    A method that `absorbs` puts them into a state of fixed size, which every query reads beside the cache:

    - `absorbed(width, value_width)`: name -> size of what each KV head has; float32, 0 where nothing was evicted yet.
    - `absorb` -> name -> tensor: the state after an eviction. Its parameters name what it reads: the state [B,G,…]
      before, `gone` [B,G,S] bool (the tokens that go now), what `__call__` may name, and the layer's trained tensors.
    - `read` -> value [B,H,T,Dv], log-sum-exp [B,H,T]: what a query finds there, as `partial_attention` says it (the
      lowest finite number where it is nothing), of `queries` [B,H,T,D] after RoPE, `scale` and `softcap` (0: none) of
      the layer's scores, the state, and the same tensors.

    Layers with a window have no such state: what leaves a window would go on being read.
    """

    grade: ClassVar[str] = "approximate"
    merges: ClassVar[bool] = True  # whether values change, so that they must not be keys too
    adds: ClassVar[bool] = False  # whether values are added up, so that they are no averages
    demotes: ClassVar[bool] = False  # whether tokens that do not stay go on in another form

    moves: ClassVar[bool] = False  # whether tokens that stay take positions from 0 on

    breaks = frozenset({Invariant.TOKENS_CONTIGUOUS})

    absorbs: ClassVar[bool] = (
        False  # whether tokens that do not stay leave something that queries read
    )

    absorbed: Callable[[int, int], Absorbed]
    absorb: Callable[..., dict[str, Tensor]]
    read: Callable[..., tuple[Tensor, Tensor]]

    parts: Callable[[int], Parts]
    encode: Callable[[Tensor], dict[str, Tensor]]
    decode: Callable[[dict[str, Tensor], int], Tensor]

    __call__: Callable[..., Tensor]
