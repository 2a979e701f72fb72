"""Methods that are one method at some options: what one keeps of a prompt the other keeps, too. A row is a sentence,
two sides, and a third that must differ, which is the control.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from accel.ir.ops.mass import drawn_attention
from accel.passes.kv.inputs import call
from accel.passes.kv.score import Base

from ..kv_slots import AXES, FORM, SCALE, choose, sets, slots

N, CALLS, LAYERS, KEPT = 16, (9, 1, 4, 2), 3, 6  # tokens, and how many each call has


@dataclass(frozen=True)
class Side:
    """A recipe: the method of each axis and its options."""

    score: str
    options: dict[str, Any] = field(default_factory=dict)
    refine: tuple[str, dict[str, Any]] | None = None
    budget: tuple[str, dict[str, Any]] = ("uniform", {})
    together: bool = False  # scores are means over the heads
    table: dict[str, list[float]] = field(default_factory=dict)  # constants of the budget

    def named(self) -> set[tuple[str, str]]:
        refine = {("refine", self.refine[0])} if self.refine else set()
        return {("score", self.score), ("budget", self.budget[0])} | refine


WINDOW = {"recent": 2}
LAST = {"window": 1, "kernel": 1}
SNAP = Side("snapkv", {"window": 3, "kernel": 1})
H2O = Side("h2o", WINDOW)


def after(refine: str, **options: Any) -> Side:
    return Side(SNAP.score, SNAP.options, (refine, options))


def share(budget: str, **options: Any) -> Side:
    return Side(SNAP.score, SNAP.options, budget=(budget, options))


def headkv(*heads: float, beta: float = 1.0) -> Side:
    """Of heads that are so important in every layer."""
    table = {"share": list(heads), "shares": [sum(heads) / len(heads)] * LAYERS}
    budget = "headkv-r2", {"window": 3, "beta": beta}
    return Side(SNAP.score, SNAP.options, budget=budget, table=table)


TABLE = {
    "a2sf that forgets nothing is h2o": (
        Side("a2sf", {**WINDOW, "decay": 1.0}), H2O, Side("a2sf", {**WINDOW, "decay": 0.2}),
    ),
    "a2sf that forgets all is tova per head": (
        Side("a2sf", {"recent": 0, "decay": 0.0}, ("chunkkv", {"chunk": 1})), Side("tova"), H2O,
    ),
    "keyformer without noise and temperature is h2o": (
        Side("keyformer", {**WINDOW, "noise": 0.0, "end": 1.0}), H2O, Side("keyformer", WINDOW),
    ),
    "snapkv of one query is tova per head": (
        Side("snapkv", LAST, ("chunkkv", {"chunk": 1})), Side("tova", {"recent": 1}),
        Side("snapkv", LAST),
    ),
    "chunkkv of one token is the score of all heads": (
        after("chunkkv", chunk=1), Side("snapkv", SNAP.options, together=True),
        after("chunkkv", chunk=2),
    ),
    "graphkv of no round is its score": (
        after("graphkv", rounds=0), SNAP, after("graphkv", rounds=1),
    ),
    "kvcrush without representatives is its score": (
        after("kvcrush", share=0.0), SNAP, after("kvcrush", share=0.5),
    ),
    "critical-kv all by score is its score": (
        after("critical-kv", share=1.0), SNAP, after("critical-kv", share=0.0),
    ),
    "pyramidkv of one width is uniform": (
        share("pyramidkv", beta=1.0, window=1), SNAP, share("pyramidkv", beta=4.0, window=1),
    ),
    "ada-kv that is safe for all is uniform": (
        share("ada-kv", safeguard=1.0), SNAP, share("ada-kv", safeguard=0.0),
    ),
    "headkv-r2 of equal heads is uniform": (headkv(1, 1), SNAP, headkv(0.4, 1.6)),
    "headkv-r2 of no pool is uniform": (
        headkv(0.4, 1.6, beta=1e6), SNAP, headkv(0.4, 1.6, beta=1.2),
    ),
}  # fmt: skip


def prompt(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's slots, none compressed yet, and the queries [B,H,N,D] of all tokens."""
    x = slots(seed, base=(0, 0, 0), recent=(N, N, N))
    x["recent_pos"] = torch.arange(N).repeat(3, 1)
    heads, width = x["queries"].shape[2:]
    every = torch.randn(3, heads, N, width, generator=torch.Generator().manual_seed(seed))
    return x, every


def draw(
    q: Tensor, k: Tensor, here: Tensor, where: Tensor, share: Tensor | None = None, **noisy: Any
) -> Tensor:
    """What slots draw of queries."""
    share = torch.ones(here.shape) if share is None else share
    operands = (q, k, k, here, where, None, SCALE, 0.0, "causal", 0)
    found: Tensor = drawn_attention(*operands, share=share, **noisy)
    return found


def mass_of(score: Base, x: dict[str, Tensor], queries: Tensor) -> Tensor:
    """What a score accumulates in the calls of a prompt [B,G,N]."""
    mass, start, steps = torch.zeros_like(x["recent_k"][..., 0]), 0, 0
    for count in CALLS:
        here = torch.arange(start, start + count).repeat(3, 1)
        start, steps = start + count, steps + 1 if count == 1 else 0
        where = x["recent_pos"][:, None].expand(-1, mass.shape[1], -1)
        where = where.masked_fill(where >= start, -1)
        now = queries[:, :, start - count : start]
        named = {
            "mass": mass, "weights": FORM.weights(now, here, x["recent_k"], where),
            "query_positions": here, "positions": where, "steps": torch.full((3,), steps),
            "layer": torch.tensor(0), "drawn": partial(draw, now, x["recent_k"], here, where[:, 0]),
        }  # fmt: skip
        mass = call(score.accumulate, named)
    return mass


class Together(Base):
    """Another score's mean over the heads."""

    def __init__(self, score: Base):
        object.__setattr__(self, "score", score)

    def __call__(
        self, queries: Any, query_positions: Any, keys: Any, positions: Any, seen: Any, scale: Any
    ) -> Tensor:
        own = self.score(queries, query_positions, keys, positions, seen, scale)
        return own.mean(1, keepdim=True).expand(own.shape)

    @property
    def recent(self) -> int:
        return self.score.recent


def kept(side: Side, seed: int) -> list[Any]:
    """Positions by layer, row and head."""
    x, queries = prompt(seed)
    score = AXES["score"].build(side.score, **side.options)
    last = max(1, score.observe)
    x["queries"] = queries.transpose(1, 2)[:, -last:]
    x["query_positions"] = torch.arange(N - last, N).repeat(3, 1)
    if "mass" in score.reads:
        x["kept_mass.recent"] = mass_of(score, x, queries)
    refine = AXES["refine"].build(side.refine[0], **side.refine[1]) if side.refine else None
    budget = AXES["budget"].build(side.budget[0], **{"tokens_kept": KEPT, **side.budget[1]})
    found = []
    x |= {f"table.{name}": torch.tensor(values) for name, values in side.table.items()}
    table = {name: np.array(values) for name, values in side.table.items()}
    for layer in range(LAYERS):
        count = budget.tokens(N, layer, LAYERS, **table)
        used, most = Together(score) if side.together else score, budget.most(count, 2, **table)
        found.append(sets(choose(x, count, used, budget, most=most, refine=refine)))
    return found


@pytest.mark.parametrize("row", TABLE)
def test_one_is_the_other(row):
    left, right, control = TABLE[row]
    if missing := [m for s in (left, right, control) for m in s.named() if m[1] not in names(m[0])]:
        pytest.skip(f"there is no {missing}")
    others = 0
    for seed in range(4):
        assert kept(left, seed) == kept(right, seed)
        others += kept(control, seed) != kept(right, seed)
    assert others >= 3, "the control"


def names(axis: str) -> list[str]:
    return AXES[axis].names()
