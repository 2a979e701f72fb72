"""YOCO (arXiv:2405.05254): layers that only read caches of lower ones run for the last token of a prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.prefill.prune._fill import filling, layers_with_state


@dataclass(frozen=True)
class Yoco(Base):
    """All tokens of a prompt but its last run through the layers up to the last one that writes a cache, and no more of
    that layer than the cache needs. Exact: nobody reads what the layers above would make of these tokens.

    At least `layers` layers must be left out; with 0 a model whose last layer has a cache is taken too, which saves
    that layer's attention and MLP. The last tokens, whose queries an eviction reads, run through all layers, too.
    Calls that keep fewer than `least` tokens from these layers run whole, since two calls read most weights twice.
    """

    layers: int = option(1, least=0)
    least: int = option(16, least=1)
    small: ClassVar[Mapping[str, Any]] = {"layers": 0, "least": 1}

    grade = "distribution-exact"  # calls of other lengths differ by rounding
    by_position = True
    relies = Base.relies | {Invariant.ALL_LAYERS_RUN, Invariant.CHAINS}
    breaks = frozenset({Invariant.BATCH_INVARIANCE})

    def run(self, program: Program) -> Report:
        count, last = len(program.facts.layers), max(layers_with_state(program), default=-1)
        self._check(program, last)
        filling(program, program.copy().step, self.least)
        program.facts.notes.append(
            f"yoco runs what comes behind the keys and values of layer {last} (of 0..{count - 1}) for the last "
            "token of a prompt alone"
        )
        return Report(changed=count - last)

    def _check(self, program: Program, last: int) -> None:
        """Raise PassError where too little would be left out; `last`: the last layer with a cache."""
        facts = program.facts
        found = len(facts.layers) - 1 - last
        if facts.encoder is not None:
            reason = (
                "the prompt of an encoder-decoder is a few tokens; leave prefill.prune out for it"
            )
        elif found < self.layers:
            reason = (
                f"{found} layers above layer {last} read only caches of lower layers, fewer than layers = "
                f"{self.layers}: layer {last} writes a cache of its own; for such models use the recipe gemfilter or "
                "fastkv, or layers = 0, which leaves out the last layer's attention and MLP"
            )
        else:
            return
        raise PassError(f"yoco: {reason}")
