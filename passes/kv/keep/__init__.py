"""Axis: what happens to tokens that are not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.invariants import Invariant, Method

__all__ = ["Absorbed", "Base", "Parts", "Tier"]

Absorbed = dict[str, tuple[int, ...]]  # name -> size, of each KV head
Parts = dict[str, tuple[str, int]]  # name -> (dtype, numbers of a token); the first is named ""


class Tier:
    """A form in which tokens that do not stay go on. The parameters of its functions name what they read; `role` is
    "k" or "v", `width` D.

    - `parts` (of `role`, `width`): what is stored of a token.
    - `whole` (likewise): what is stored once for all tokens of a head that come in at one eviction, such as a scale of
      each channel; nothing, unless a form says otherwise.
    - `encode` -> name -> tensor, of `x` [B,G,S,D], `joins` [B,G,S] bool (the slots whose tokens come in now; others may
      hold anything) and `role`: [B,G,S,n] of a token, [B,G,1,n] of what is whole.
    - `decode` -> [B,G,Q,D], of `parts` (name -> [B,G,Q,n], what is whole as well, for each token that of its eviction),
      `width` and `role`.

    What was encoded stays as it is, to the bit, as long as its token is there.
    """

    parts: Callable[..., Parts]
    encode: Callable[..., dict[str, Tensor]]
    decode: Callable[..., Tensor]

    def whole(self, role: str, width: int) -> Parts:
        """See above."""
        return {}


class Base(Method):
    """What happens to evicted tokens: a pure function of tensors, traced into the graph, that returns the
    values to store.

    Inputs: `keys`, `values` [B,G,S,D] of all slots; `positions` [B,G,S] (-1: empty); `chosen` [B,G,N], the slots of
    the kept tokens, and `real` [B,G,N], which of them are valid; `scores` [B,G,S], and the inputs of scores. Output:
    values [B,G,N,D], stored with the keys of the chosen slots; where a method `moves`, these are rotated to positions
    0..N-1, and the session goes on from there.

    A method that moves and `makes` keys returns (keys, values) [B,G,N,D] of the N places instead, all of them made of
    all slots; its `keys` are as they are before rotation, and so is what it returns. A row of which nothing goes keeps
    what it has.

    A method that `demotes` also keeps other tokens, in one form or several: `tiers`, name -> `Tier`; where it is one,
    the method may be it. Of several `tier` says which: a number [B,G,S] for each token that goes (`gone` [B,G,S] bool,
    which it may name beside what `__call__` may), in the order of `tiers`; -1: none, it is evicted.

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
    observe: int = 0  # last queries that it reads as `queries`
    merges: ClassVar[bool] = True  # whether values change, so that they must not be keys too
    adds: ClassVar[bool] = False  # whether values are added up, so that they are no averages
    demotes: ClassVar[bool] = False  # whether tokens that do not stay go on in another form

    moves: ClassVar[bool] = False  # whether tokens that stay take positions from 0 on
    makes: ClassVar[bool] = False  # whether what takes them has keys of its own

    breaks = frozenset({Invariant.TOKENS_CONTIGUOUS})

    absorbs: ClassVar[bool] = (
        False  # whether tokens that do not stay leave something that queries read
    )

    absorbed: Callable[[int, int], Absorbed]
    absorb: Callable[..., dict[str, Tensor]]
    read: Callable[..., tuple[Tensor, Tensor]]

    tier: Callable[..., Tensor]

    @property
    def tiers(self) -> Mapping[str, Any]:
        """The forms of tokens that are demoted; the name of a single one may be ""."""
        return {"": self}

    def counts(self, gone: int) -> tuple[int, ...]:
        """How many of so many tokens that go at once come into each form; where it depends on them, those that cost
        most.
        """
        return (*(0 for _ in range(len(self.tiers) - 1)), gone)

    __call__: Callable[..., Any]
