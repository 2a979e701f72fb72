"""`entropy` [B,G,S]: the entropy of the attention of each token's own query, a mean over the heads of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes.kv.inputs import Input, Site
from accel.passes.kv.inputs._accumulated import accumulate


class Entropy(Input):
    """State `mass.<layer>.entropy.…`, which the call of a token writes into its slot."""

    names = ("entropy",)
    relies = frozenset({Invariant.ALL_LAYERS_RUN, Invariant.FULL_ATTENTION})
    breaks = frozenset({Invariant.REWIND})  # what a draft drew of attention cannot be taken back

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        for site in sites:
            accumulate(program, site, "entropy", own_entropy, "entropy", "entropy")


def own_entropy(
    entropy: Tensor, weights: Tensor, query_positions: Tensor, positions: Tensor
) -> Tensor:
    """Operands as `accumulate` gives them: `entropy` [B,G,S], with that of the call's tokens in their slots."""
    rows = -(weights * weights.clamp(min=1e-38).log()).sum(-1).mean(2)  # [B,G,T]
    query = query_positions[:, None, :, None]
    own = (positions[:, :, None] == query) & (query >= 0)  # [B,G,T,S]
    return entropy + (rows[:, :, None] @ own.to(rows.dtype))[:, :, 0]
