"""prefill.sparse: which of the keys before it each stretch of a long prompt reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant, Method
from accel.ir.prefill import Prefill, Segments
from accel.ir.program import Program
from accel.passes import Pass, Report
from accel.passes.fuse.residual import Residual
from accel.passes.prefill.sparse._segment import sparse_entry
from accel.passes.state.layers import Layers

__all__ = ["Base"]


class Choice(Method):
    """What a method may set beside the options of all: a class attribute, or an option of its own."""

    score: Callable[..., Tensor]  # [B,G,NB]; the highest are read, those of -inf never
    order: Callable[..., Tensor]  # [B,G,C], with `orders`: each segment's keys by falling value
    score_columns: Callable[..., Tensor]  # [B,G,C], with `columns`: of single keys
    orders: ClassVar[bool] = False
    fuses: ClassVar[bool] = False  # blocks are chosen by `fuse`
    observe: int = 0  # last queries of a segment whose `logits` are computed
    columns: int = 0  # tokens of the budget that are read as single keys
    share: float = 1.0  # where a list of blocks ends, by cumulated weight; 1: at the budget


@dataclass(frozen=True)
class Base(Pass, Choice):
    """Sparse prefill. A session splits a prompt into segments of `segment` tokens, from an empty cache on. A
    segment that begins
    at `threshold` or later, and is not the last, attends to its own tokens and to `budget` earlier tokens, in blocks of
    `block`, selected per KV head in each layer from `first` on that has full causal attention. All other
    segments and calls attend to all keys.

    A segment with no more earlier tokens than the budget also attends to all keys.

    A method scores blocks. It may also order the keys of a segment before they are cut into blocks, and have
    `columns` of the budget read as single keys beside blocks. The parameter names of these functions select their
    inputs; only these are computed.

    | parameter | |
    |---|---|
    | `queries` [B,H,T,D] | of the segment, after RoPE |
    | `keys` [B,G,C,D] | of all slots, after RoPE |
    | `logits` [B,G,R,W,C] | scores of the segment's last `observe` queries; the lowest number where hidden |
    | `attention` [B,G,R,W,C] | their softmax, beside the layer's sink if it has one; of a NaN 0 |
    | `first` [B] | the segment's first slot |
    | `earlier` [B,C] | whether a slot is before the segment |
    | `past` [B,NB] | whether a block is |
    | `slots` [B,G,S] | the slot of each key in the order of blocks, where a method orders them |
    | `form` | what makes attention of q k^T: scale, cap, sink (`ir.ops.attention.Form`) |
    | `high`, `low` [B,G,NB,D] | what `summary` gives |

    Tokens of later segments are not there yet: estimates are of the segment's own last queries. There is one
    list of keys per segment and KV head, a union where a paper has smaller blocks of queries, or a list per query
    head. Attention over all keys chosen equals partial attentions that are merged by their log-sum-exp.
    """

    segment: int = option(512, least=1)
    block: int = option(32, least=1, most=4096)
    budget: int = option(2048, least=1)
    threshold: int = option(4096, least=0)
    first: int = option(1, least=0)

    after = (Layers, Residual)
    stage = 2
    grade = "approximate"

    relies = frozenset({Invariant.APPEND_ONLY, Invariant.CHAINS, Invariant.UNIFORM_SLOTS})
    breaks = frozenset(
        {Invariant.CALL_INDEPENDENT, Invariant.BATCH_INVARIANCE, Invariant.FULL_ATTENTION}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name, single = self.full_name, self.columns
        if single > self.budget:
            raise RecipeError(f"{name}: columns is {single}; give at most budget = {self.budget}")
        if self.segment % self.block or (self.budget - single) % self.block:
            less = f" less columns = {single}" if single else ""
            raise RecipeError(
                f"{name}: segment = {self.segment} and budget = {self.budget}{less} must be multiples "
                f"of block = {self.block}"
            )
        if self.observe > self.segment:
            raise RecipeError(
                f"{name}: observe is {self.observe}; give at most segment = {self.segment}"
            )

    def summary(self, blocks: Tensor) -> dict[str, Tensor]:
        """What is known of each block of keys [B,G,NB,block,D], for `score` to name: [B,G,NB,…]."""
        return {"high": blocks.amax(3), "low": blocks.amin(3)}

    def fuse(self, weights: Tensor, before: Tensor) -> Tensor:
        """Softmax of a layer's scores over the blocks [B,G,NB], and what this gave in the layer before: what
        blocks are chosen by, where the method `fuses`.
        """
        raise NotImplementedError(f"{type(self).__name__} fuses, but has no fuse method")

    def in_layers(self, program: Program) -> Mapping[int, Self]:
        """The method as single layers have it, by their number; none: as it is."""
        return {}

    def run(self, program: Program) -> Report:
        threshold = max(self.threshold, self.budget)
        if program.facts.max_context <= threshold + self.segment:
            why = f"prompts of at most {program.facts.max_context} tokens read all keys"
            return Report(
                refused=[
                    f"{why}: no segment of {self.segment} tokens after token {threshold} has a successor"
                ]
            )
        entry, layers = sparse_entry(program, self, self.in_layers(program))
        program.entries["sparse"] = entry
        found = program.facts.prefill or Prefill()
        program.facts.prefill = replace(found, segments=Segments(self.segment, threshold))
        return Report(changed=layers)
