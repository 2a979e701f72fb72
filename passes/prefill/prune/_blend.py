"""The step in two parts, between which a session chooses the tokens that the second runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.ir.entries.blend import EARLY, LATE, telling
from accel.ir.errors import PassError
from accel.ir.program import Program
from accel.passes import Pass, Report
from accel.passes.fuse.residual import Residual
from accel.passes.prefill.prune._cut import beginning, ending, scoring
from accel.passes.state.layers import Layers


@dataclass(frozen=True)
class Blend(Pass):
    """-> the entries `blend.0`, the layers up to `layer` (-1: the second, or the first of two), and `blend.1`, the
    layers behind it, over the state of the step.

    Nothing scatters: a session empties the slots of the tokens that `blend.1` runs again (position -1), lets it write
    them into slots behind all others, and then moves them. Attention masks by position, so their order is no matter.

    `attention`: `blend.0` also gives `scores [B,C]`, the attention of the queries `rows [B,N]` at that layer to each
    slot, summed over queries and heads.
    """

    what: str
    layer: int = -1
    attention: bool = False

    after = (Layers, Residual)
    must_change = True
    grade = "approximate"  # layers behind read keys and values that other tokens came before

    every: ClassVar[bool] = False
    observe: ClassVar[int] = 1

    def run(self, program: Program) -> Report:
        layer = self._check(program)
        program.entries[EARLY] = (
            scoring(program, 0, layer, self, whole=True)
            if self.attention
            else beginning(program, layer)
        )
        program.entries[LATE] = ending(program, layer + 1)
        program.facts.notes.append(f"{self.what} tells stale tokens at layer {layer}")
        return Report(changed=2)

    def score(self, weights: Tensor) -> Tensor:
        return weights.sum((1, 2))

    def _check(self, program: Program) -> int:
        """The layer that tells. Raises PassError where the model cannot be cut behind it."""
        count = len(program.facts.layers)
        layer = telling(self.layer, count)
        reason = None
        if program.facts.encoder is not None:
            reason = "this decoder's keys and values also depend on the encoder input, which reuse does not compare"
        elif any(facts.shares is not None for facts in program.facts.layers):
            reason = "layers of this model read keys of other layers, which may hold other texts"
        elif not 0 <= layer < count - 1:
            reason = f"no layer comes after layer {max(layer, 0)} of {count}"
        if reason:
            raise PassError(f"{self.what}: {reason}; leave it out for this model")
        return layer
