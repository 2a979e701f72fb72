"""prefill.prune: what the model, or its deeper layers, continue with of a prompt."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.ir.invariants import Invariant, Method
from accel.passes import Pass
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers

__all__ = ["Base"]


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Prompt pruning: a pass with the score of prompt tokens (`score`), the layers that compute it, and how many
    tokens stay (`Pick`). `_cut.py` runs it before the model, or `_stages.py` at one or several layers, with separate
    slots for the layers after each.

    `score` is a pure function of tensors, traced into the graph. The parameter names select its inputs; only these
    are computed.

    | parameter | |
    |---|---|
    | `queries` [B,H,N,D], `query_positions` [B,N] | the prompt's last `observe` queries; position -1: fewer |
    | `keys` [B,G,S,D] | as cached |
    | `positions` [B,S] | position of each slot; -1: empty |
    | `weights` [B,H,N,S] | attention weights of these queries; 0 of a query that is not there |
    | `before` [B,S] | scores of the layers before that scored, of this stage and of earlier ones; 0 where none did |

    It returns scores [B,S]; the highest stay. The last layer of a stage computes it, or, with `every`, all layers of a
    stage in their order. With `observe` = 0 each call of a long prompt scores with its own queries, and `before` holds
    what the calls before it returned.

    Sessions prune prompts only (`Session.prompt`). The step is unchanged, so `Session.run` and the numeric
    check use the whole model.

    A method that drops no token has no score: one leaves out layers that most of a prompt does not need (`yoco.py`),
    one adds to the cache behind it (`cache_augment.py`).
    """

    after = (Layers, Residual)
    stage = 2  # after depth methods, which may delete layers
    must_change = True
    grade = "approximate"
    every: ClassVar[bool] = False

    relies = frozenset({Invariant.APPEND_ONLY})
    breaks = frozenset(
        {Invariant.ALL_TOKENS_HELD, Invariant.BATCH_INVARIANCE, Invariant.EVERY_TOKEN_RUNS}
    )

    score: ClassVar[Callable[..., Tensor]]

    @property
    def observe(self) -> int:
        """Number of last queries of a prompt that `score` is computed from; 0: all."""
        return 1
