"""prefill.prune: which prompt tokens the model, or its deeper layers, continue with."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from torch import Tensor

from accel.ir.invariants import Invariant, Method
from accel.passes import Pass
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers

__all__ = ["Base"]


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Prompt pruning: a pass with the score of prompt tokens (`score`), the layer that computes it, and the number of
    tokens to keep. `_cut.py` runs it before the model, or `_stages.py` at a layer, with separate slots for
    the layers after it.

    Sessions prune prompts only (`Session.prompt`). The step is unchanged, so `Session.run` and the numeric
    check use the whole model.
    """

    after = (Layers, Residual)
    rank = 2  # after depth methods, which may delete layers
    must_change = True
    grade = "approximate"

    relies = frozenset({Invariant.APPEND_ONLY})
    breaks = frozenset({Invariant.ALL_TOKENS_HELD, Invariant.BATCH_INVARIANCE})

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What queries [B,H,N,D] make of keys [B,G,S,D] at the layer that decides: [B,N,S], higher stays.
        By default q k^T, summed over the heads; queries that share a key are added first.
        """
        shared = queries.unflatten(1, (keys.shape[1], -1)).sum(2)  # [B,G,N,D]
        worth: Tensor = (shared.float() @ keys.float().transpose(-1, -2)).sum(1)
        return worth
