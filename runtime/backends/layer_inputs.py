"""The graph's inputs that say which layers run, and how precisely the cache is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.depth import Depth
from accel.ir.facts import Facts
from accel.ir.kv import COARSE

NEVER = 2.0  # a confidence that no token reaches


@dataclass(frozen=True, eq=False)
class Controls:
    """What the graph is told beside the tokens: layers [L] bool, threshold [] float32."""

    layers: npt.NDArray[np.bool_]
    threshold: float = NEVER

    def arrays(self, depth: Depth) -> dict[str, npt.NDArray[Any]]:
        """The graph's inputs by name."""
        found: dict[str, npt.NDArray[Any]] = {"run_layers": self.layers}
        if depth.threshold is not None:
            found["threshold"] = np.array(self.threshold, np.float32)
        return found


def reading(coarse: bool) -> dict[str, npt.NDArray[Any]]:
    """The input that says how precisely the cache is read."""
    return {COARSE: np.array(coarse)}


def everything(facts: Facts) -> dict[str, npt.NDArray[Any]]:
    """The inputs with which all layers run and read all bits; empty for a graph without conditions."""
    depth, kv = facts.depth, facts.kv
    layers = {} if depth is None else Controls(np.ones(len(depth.plan), bool)).arrays(depth)
    return layers | (reading(False) if kv is not None and kv.coarse else {})
