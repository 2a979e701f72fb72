"""MagicDec (arXiv:2408.11049): self-speculative decoding for long contexts; the model drafts over a cache of constant
size, which an eviction method chose, and verifies over all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters
from accel.runtime.draft.model import Chains
from accel.runtime.session.session import Session
from accel.runtime.speculation.heir import Heir

_BYTES = 4  # of a number, in weights and in the cache


@dataclass(frozen=True)
class MagicDec(Base):
    """`tokens`: of the context, those that each head of the drafting cache keeps; the tokens that come later are all
    kept. `score`: the method of the axis `kv.score` that chooses them, once, when drafting begins. Both caches read
    the same weights, so drafting pays only where the cache is much of what a step reads: long contexts, large batches.

    Of `streaming-llm` they are the first tokens and the newest ones of the prompt, where they lie: the window does not
    slide, and what is drafted can be taken back.
    """

    tokens: int = option(256, least=1, most=1 << 24)
    score: str = "snapkv"

    asks = {"tree": "chain"}
    relies = frozenset({Invariant.CHAINS})
    provides = frozenset({Invariant.DRAFT_MODEL, Invariant.PROBABILITIES})
    small: ClassVar[Mapping[str, Any]] = {"tokens": 8}

    def draft_recipe(self) -> Recipe:
        budget = {"use": "uniform", "tokens_kept": self.tokens}
        once = {"use": "prompt"}  # whenever the score would choose by itself
        score = {"use": self.score}
        return Recipe("magicdec", tables={"kv.score": score, "kv.budget": budget, "kv.when": once})

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        own = None if context.model is None else context.model.draft_model
        if context.model is None or own is None:
            raise InputError(
                "draft.magicdec: this model was built without its drafting cache; build it again"
            )
        longest = max((row.prompt.size for row in rows), default=0)
        cost = cost_of(context.model.facts, longest, self.tokens, len(rows))
        return Chains(Heir(own, rows, session), rows, context, session.vocab_size, cost)


def cost_of(facts: Facts, context: int, kept_tokens: int, rows: int) -> float:
    """What a step over so many kept tokens of each row reads, as a share of what one over the whole context does."""
    each = rows * sum(2 * one.num_kv_heads * one.head_dim for one in facts.layers)
    weights = _BYTES * facts.parameters
    return (weights + _BYTES * each * min(kept_tokens, context)) / max(
        1, weights + _BYTES * each * context
    )
