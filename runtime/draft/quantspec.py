"""QuantSpec (arXiv:2502.10424): self-speculative decoding; drafts read weights and the older tokens' keys and values in
4 bits, verification reads the same in 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft._by_self import BySelf
from accel.runtime.session.session import Session

_BYTES = 4  # of a weight, where nothing says how it is stored: at most


@dataclass(frozen=True)
class Quantspec(Base):
    """All layers draft over one copy of the weights and one cache, of which a draft reads half the bits. Weights: with
    `weights = quantspec-weights` the upper 4 of 8 bits; of a checkpoint in codes of 4 bits those, which verification
    reads, too; any other format is read whole, and drafting then pays only where the cache is much of what a step
    reads.
    """

    asks = {"tree": "chain"}
    needs = {"kv.codec": "quantspec-kv"}
    relies = frozenset({Invariant.CHAINS, Invariant.COARSE_READS})
    provides = frozenset({Invariant.PROBABILITIES})

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        longest = max((row.prompt.size for row in rows), default=0)
        cost = 1.0 if context.model is None else cost_of(context.model.facts, longest * len(rows))
        return BySelf(session, rows, context, cost, coarse=True)


def cost_of(facts: Facts, tokens: int) -> float:
    """What a draft's step reads where rows hold so many tokens, all told, as a share of what any step reads: half of
    the cache, and of the weights what is not in their lower halves.
    """
    cache = tokens * sum(2 * one.num_kv_heads * one.head_dim for one in facts.layers)
    weights = facts.weight_bytes or _BYTES * facts.parameters
    return 1 - (cache / 2 + facts.finer_bytes) / max(1, cache + weights)
