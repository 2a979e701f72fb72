"""Axis: the importance of a cached token. The entry `compress` keeps the tokens with the highest scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.invariants import Invariant, Method
from accel.passes.kv.inputs import relied
from accel.passes.kv.inputs._accumulated import Draw

__all__ = ["Base"]


class Base(Method):
    """The importance of a cached token: a pure function of tensors, traced into the graph. The parameter
    names select its inputs; only these are computed.

    | parameter | |
    |---|---|
    | `keys`, `values` [B,G,S,D] | as cached, keys after RoPE; slots ordered by position |
    | `positions` [B,G,S] | position of each slot; -1: empty |
    | `seen` [B] | tokens of each row so far |
    | `queries` [B,H,W,D], `query_positions` [B,W] | the last `observe` queries; position -1: fewer |
    | `notes` [B,G,S] | the value that `note` computed for the slot's token |
    | `mass` [B,G,S] | attention that the slot drew so far, as `accumulate` adds it up |
    | `entropy` [B,G,S] | entropy of the attention of the slot's own query |
    | `keep` [B] | tokens that a head keeps, on average |
    | `output` [H,D,E] | the layer's output projection |
    | `query_mean` [B,H,D] | of the queries so far, rotated to the next `future` positions; not of the first `sinks` |
    | `query_covariance` [B,H,D,D] | likewise |
    | `mean_rotation` [B,D,D] | x @ it: a query before RoPE, rotated to the next `future` positions, their mean |
    | `unrotated_keys` [B,G,S,D] | keys before RoPE |
    | `prompt` [B] | tokens of each row that are the prompt's; all of them while it runs |
    | `units` [B,G,S] | the unit of the slot's token, as `Session.mark` says; -1: none |
    | `question` [B] | the position where the question begins, as `Session.mark` says; -1: nobody said |
    | `ahead` [B,G,S] | the position of a slot's token that ran behind `seen`, as the last `queries` may; else -1 |
    | `attends` | attends(queries, query_positions) [B,G,R,W,S]: the layer's attention (`inputs/attends.py`) |
    | `form` | what makes it of q k^T: scale, cap, sink and mask (`ir.ops.attention.Form`) |

    It returns scores [B,G,S]; the highest are kept, of equal ones the newest; empty slots are ignored. The first
    `sinks` and the last `recent` tokens are always kept.
    """

    when: ClassVar[str] = "prompt"  # what a recipe without [kv.when] means
    observe: int = 0
    lookahead: int = (
        0  # tokens that a session guesses at the end of a prompt: the last of `queries` are theirs
    )
    repeats: bool = False  # whether a session runs a prompt again, with `mass` 0 before
    sinks: int = 0
    recent: int = 0
    future: int = 1
    grade: ClassVar[str] = "approximate"
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ()  # options that laws hold beside `small`

    __call__: Callable[..., Tensor]

    @property
    def reads(self) -> frozenset[str]:
        """The names of what it goes by."""
        return frozenset(inspect.signature(type(self).__call__).parameters)

    @property
    def relies(self) -> frozenset[Invariant]:
        found = {Invariant.APPEND_ONLY, Invariant.FIXED_LAYERS}
        if self.lookahead or self.repeats:  # a session then runs tokens of no stage
            found.add(Invariant.UNIFORM_SLOTS)
        return relied(self.reads)[0] | found

    @property
    def breaks(self) -> frozenset[Invariant]:
        found = {
            Invariant.ALL_TOKENS_HELD,
            Invariant.CALL_INDEPENDENT,
            Invariant.BATCH_INVARIANCE,
            Invariant.HEADS_ALIKE,
            Invariant.TOKENS_CONTIGUOUS,
        }
        return relied(self.reads)[1] | found

    def accumulate(self, mass: Tensor, drawn: Draw) -> Tensor:
        """`mass` [B,G,S] after a call, for scores that name it; the parameters name what it reads
        (`passes/kv/inputs/_accumulated.py`). By default the attention weights are added up.
        """
        return mass + drawn()

    def note(self, hidden: Tensor, **trained: Tensor) -> Tensor:
        """What is noted of each token when it is cached, for scores that name `notes`: hidden
        [B,T,E], that its key is made of -> [B,T,G]. `trained`: a layer's trained tensors, if any. The parameters name
        what it reads; `passes/kv/inputs/notes.py` lists others.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `notes`, but has no note method")
