"""depth: how many of the layers a call runs, and what becomes of the keys that the others would have made.

A layer that is left out passes the residual stream through. Its cache has two kinds (the option
`cache`): `nested`, where it writes nothing, and whoever runs the graph keeps the layer off until the
tokens that it missed are forgotten (`runtime.depth`); and `propagate`, where it makes its keys and values
from what passes through, so that any call may run any layers.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from accel.ir.invariants import Invariant, Method
from accel.passes import Pass
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """A method is a pass over the layers: it takes them out, or puts each under a condition
    (`_joint.conditions`) and says in `program.facts.depth` which of them a call runs by default.
    """

    after = (Layers, Residual)
    rank = 1  # after what works within layers
    grade = "approximate"

    relies = frozenset({Invariant.APPEND_ONLY})

    @property
    def breaks(self) -> frozenset[Invariant]:
        """By default a call may leave out layers, and single tokens go through fewer than those of longer calls."""
        return frozenset(
            {
                Invariant.ALL_LAYERS_RUN,
                Invariant.CALL_INDEPENDENT,
                Invariant.DECODE_WIDTH,
                Invariant.EXACT_WIDTH,
            }
        )

    @property
    def provides(self) -> frozenset[Invariant]:
        """By default a call may say which layers run."""
        return frozenset({Invariant.LAYERS_BY_CALL})
