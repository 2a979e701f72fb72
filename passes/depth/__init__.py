"""depth: which layers a call runs, and how the cache of skipped layers is handled.

A skipped layer passes the residual stream through. Its cache has two modes (the option `cache`): `nested`: the layer
writes nothing, and the session keeps it off until the tokens that it missed are rewound
(`session/state/layer_schedule.py`); `propagate`: it computes keys and values from the residual stream, so any call may
run any layers.
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
    """A pass over the layers: it deletes layers, or makes each conditional (`_joint.conditions`) and sets in
    `program.facts.depth` the layers that a call runs by default.
    """

    after = (Layers, Residual)
    stage = 1  # after what works within layers
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
                Invariant.BATCH_INVARIANCE,
            }
        )

    @property
    def provides(self) -> frozenset[Invariant]:
        """By default a call may say which layers run."""
        return frozenset({Invariant.LAYERS_BY_CALL})
