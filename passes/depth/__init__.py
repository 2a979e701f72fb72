"""depth: how many of the layers a call runs, and what becomes of the keys that the others would have made.

A layer that is left out passes the residual stream through. Its cache has two kinds (the option
`cache`): `nested`, where it writes nothing, and whoever runs the graph keeps the layer off until the
tokens that it missed are forgotten (`runtime.depth`); and `propagate`, where it makes its keys and values
from what passes through, so that any call may run any layers.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.passes import Pass
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers


@dataclass(frozen=True)
class Base(Pass, ABC):
    """A method is a pass over the layers: it takes them out, or puts each under a condition
    (`_joint.conditions`) and says in `program.facts.depth` which of them a call runs by default.
    """

    after = (Layers, Residual)
    rank = 1  # after what works within layers
    grade = "approximate"
    leaves_out: ClassVar[bool] = (
        True  # whether single tokens go through fewer layers than those of longer calls
    )
    by_call: ClassVar[bool] = True  # whether a call may say which layers run

    def apart(self, axis: str, method: Any) -> str:
        """Why it cannot go with another method of a recipe; empty where it can."""
        if axis == "kv.score" and method.reads & {"queries", "mass"}:
            return "its layers stand under conditions, out of which that score would take what their tokens ask for"
        return ""
