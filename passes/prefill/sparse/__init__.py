"""prefill.sparse: which of the keys before it each stretch of a long prompt reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from accel.ir.axis import count
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant, Method
from accel.ir.prefill import Prefill, Segments
from accel.ir.program import Program
from accel.passes import Pass, Report
from accel.passes.fuse.residual import Residual
from accel.passes.prefill.sparse._segment import sparse_entry
from accel.passes.state.layers import Layers

__all__ = ["Base"]


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """Sparse prefill. A session splits a prompt into segments of `segment` tokens, from an empty cache on. A
    segment that begins
    at `threshold` or later, and is not the last, attends to its own tokens and to `budget` earlier tokens, in blocks of
    `block`, selected per KV head in each layer from `first` on that has full causal attention. All other
    segments and calls attend to all keys.

    A segment with no more earlier tokens than the budget also attends to all keys.
    """

    segment: int = 512
    block: int = count(32, most=4096)
    budget: int = 2048
    threshold: int = 4096
    first: int = 1

    after = (Layers, Residual)
    rank = 2
    grade = "approximate"

    relies = frozenset({Invariant.APPEND_ONLY, Invariant.CHAINS, Invariant.UNIFORM_SLOTS})
    breaks = frozenset(
        {Invariant.CALL_INDEPENDENT, Invariant.BATCH_INVARIANCE, Invariant.FULL_ATTENTION}
    )

    def __post_init__(self) -> None:
        name = f"prefill.sparse.{type(self).__name__.lower()}"
        if min(self.segment, self.block, self.budget) < 1 or min(self.threshold, self.first) < 0:
            raise RecipeError(
                f"{name}: segment is {self.segment}, block {self.block}, budget {self.budget}, threshold "
                f"{self.threshold} and first {self.first}; give at least 1, 1, 1, 0 and 0"
            )
        if self.segment % self.block or self.budget % self.block:
            raise RecipeError(
                f"{name}: segment = {self.segment} and budget = {self.budget} must be multiples "
                f"of block = {self.block}"
            )

    @abstractmethod
    def score(self, queries: Tensor, high: Tensor, low: Tensor, scale: float) -> Tensor:
        """What a segment's queries [B,H,T,D] make of blocks of keys, whose largest and smallest numbers are
        high, low [B,G,NB,D]: [B,G,NB], higher is read. Attention multiplies q k^T by `scale`.
        """

    def fuse(self, weights: Tensor, before: Tensor) -> Tensor:
        """Softmax of a layer's scores over the blocks [B,G,NB], and what this gave in the layer before
        (of another form where `fuses` is false): what the blocks are chosen by.
        """
        return weights

    def run(self, program: Program) -> Report:
        threshold = max(self.threshold, self.budget)
        if program.facts.max_context <= threshold + self.segment:
            why = f"prompts of at most {program.facts.max_context} tokens read all keys"
            return Report(
                refused=[
                    f"{why}: no segment of {self.segment} tokens after token {threshold} has a successor"
                ]
            )
        entry, layers = sparse_entry(program, self)
        program.entries["sparse"] = entry
        found = program.facts.prefill or Prefill()
        program.facts.prefill = replace(found, segments=Segments(self.segment, threshold))
        return Report(changed=layers)
