"""The graph's inputs that say which layers run, and how precisely the cache is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.depth import RUN_ATTN, RUN_LAYERS, RUN_MLP, RUN_ROWS, Depth
from accel.ir.facts import Facts
from accel.ir.kv import COARSE
from accel.ir.picks import EVERY_ROW, NONE, PICKS

NEVER = 2.0  # a confidence that no token reaches


@dataclass(frozen=True, eq=False)
class Controls:
    """What the graph is told beside the tokens: layers [L] bool, or those whose attention and those whose MLP runs;
    threshold [] float32. rows: of each row the layers that change its stream [B,L]; none: those that run.
    """

    layers: npt.NDArray[np.bool_]
    threshold: float = NEVER
    mlp: npt.NDArray[np.bool_] | None = None
    rows: npt.NDArray[np.bool_] | None = None

    def same(self, other: Controls) -> bool:
        """Whether both say the same."""
        return self.threshold == other.threshold and all(
            a is b or (a is not None and b is not None and np.array_equal(a, b))
            for a, b in (
                (self.layers, other.layers),
                (self.mlp, other.mlp),
                (self.rows, other.rows),
            )
        )

    def arrays(self, depth: Depth) -> dict[str, npt.NDArray[Any]]:
        """The graph's inputs by name."""
        found: dict[str, npt.NDArray[Any]] = {RUN_LAYERS: self.layers}
        if self.mlp is not None:
            found = {RUN_ATTN: self.layers, RUN_MLP: self.mlp}
        if depth.threshold is not None:
            found["threshold"] = np.array(self.threshold, np.float32)
        if depth.by_prompt is not None:
            found[RUN_ROWS] = (
                np.ones((1, len(self.layers)), bool) if self.rows is None else self.rows
            )
        return found


def whole(depth: Depth) -> Controls:
    """What runs everything."""
    every = np.ones(len(depth.plan), bool)
    return Controls(every, NEVER, None if depth.mlp is None else every)


def reading(coarse: bool) -> dict[str, npt.NDArray[Any]]:
    """The input that says how precisely the cache is read."""
    return {COARSE: np.array(coarse)}


def every_row() -> dict[str, npt.NDArray[Any]]:
    """The inputs with which layers compute all rows of a call."""
    return {EVERY_ROW: np.array(True), PICKS: np.full((1, 1), NONE)}


def some_rows(picks: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """The inputs with which layers compute these rows [B,K] of a call (`ir.picks`)."""
    return {EVERY_ROW: np.array(False), PICKS: picks}


def everything(facts: Facts) -> dict[str, npt.NDArray[Any]]:
    """The inputs with which all layers run on all rows and read all bits; empty for a graph without conditions."""
    depth, kv = facts.depth, facts.kv
    layers = {} if depth is None else whole(depth).arrays(depth)
    rows = {} if facts.picks is None else every_row()
    return layers | rows | (reading(False) if kv is not None and kv.coarse else {})
