"""prefill.prune: the tokens of a prompt that the model, or its deeper layers, go on with."""

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
    """A method is a pass that says what a prompt's tokens are worth (`score`), at which layer, and how many
    stay. `_cut.py` asks that before the model runs, or on the way, where `_stages.py` gives the layers after
    it slots of their own.

    Sessions prune what they are given as a prompt (`Session.prompt`); the step itself computes what it
    did, so that `Session.run` and the numeric check see the whole model.
    """

    after = (Layers, Residual)
    rank = 2  # after depth methods, which may delete layers
    must_change = True
    grade = "approximate"

    relies = frozenset({Invariant.APPEND_ONLY})
    breaks = frozenset({Invariant.ALL_TOKENS_HELD, Invariant.EXACT_WIDTH})

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What queries [B,H,N,D] make of keys [B,G,S,D] at the layer that decides: [B,N,S], higher stays.
        By default q k^T, summed over the heads; queries that share a key are added first.
        """
        shared = queries.unflatten(1, (keys.shape[1], -1)).sum(2)  # [B,G,N,D]
        worth: Tensor = (shared.float() @ keys.float().transpose(-1, -2)).sum(1)
        return worth
