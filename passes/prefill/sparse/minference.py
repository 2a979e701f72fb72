"""MInference (arXiv:2407.02490): the vertical and slash lines that the last queries attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Form
from accel.ir.program import Program
from accel.ir.tables import Observed
from accel.passes.kv._shared.tables import observed
from accel.passes.prefill.sparse import Base
from accel.passes.prefill.sparse._inputs import LOWEST, best_of_next, diagonals, mean_queries
from accel.passes.prefill.sparse._segment import chosen
from accel.passes.weights._calibrated import calibration_of

_ALWAYS = 1e9
_ROWS = 8  # of the calibration text
_APART = 5e-3  # outputs that differ by more count
PATTERNS = "vertical-slash", "A-shape", "block-sparse"


@dataclass(frozen=True)
class MInference(Base):
    """Attention of a segment's last `observe` queries, summed over them and the heads of a group, gives each key
    a vertical value and each distance a slash value. The best `columns` keys are read singly, the first `sinks` among
    them. Blocks are those that the best distances cross, all up to `near` among them, until the budget is full: a block
    is worth its best distance.

    `searched`: each KV head has one of three patterns, found when the model is built, out of the calibration text: the
    one with the fewest outputs of a row's last segment that differ from those of full attention. They are the above;
    A-shape, the first `columns` keys and the newest blocks; and block-sparse, the blocks whose mean keys have the
    highest product with a mean query of a block, and no single keys. Without it all heads are vertical-slash, as in the
    release those that its search did not list.

    Each pattern is tried at one split of the budget, where the paper's search has several into columns and distances.
    In rows that are too short for it all sizes are halved until it fits. Runs of keys are of a segment's queries, not
    of 64, and are rounded outward to blocks: more is read.
    """

    block: int = 64
    budget: int = 3072
    columns: int = option(1024, least=1)
    observe: int = option(64, least=1, most=4096)
    sinks: int = option(30, least=0)
    near: int = option(100, least=0)
    searched: bool = False
    patterns: tuple[int, ...] = field(default=(), init=False)  # of each KV head of a layer
    lacks = "several splits of the budget in the search of patterns"
    small: ClassVar[Mapping[str, Any]] = {
        "segment": 8, "block": 4, "budget": 8, "threshold": 8, "columns": 4, "observe": 4, "sinks": 1, "near": 2
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks > self.columns:
            raise RecipeError(
                f"{self.full_name}: sinks is {self.sinks}; give at most columns = {self.columns}"
            )

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        return self.searched

    def summary(self, blocks: Tensor) -> dict[str, Tensor]:
        """See Base."""
        return {"mean": blocks.float().mean(3)}

    def score_columns(self, attention: Tensor) -> Tensor:
        vertical = attention.sum((2, 3))  # [B,G,C]
        number = torch.arange(vertical.shape[2], device=vertical.device)
        vertical = vertical + _ALWAYS * (number < self.sinks)
        first = (-number.float()).expand_as(vertical)
        return self._by_head(vertical, first, torch.full_like(vertical, -torch.inf))

    def score(
        self, attention: Tensor, first: Tensor, queries: Tensor, mean: Tensor, form: Form
    ) -> Tensor:
        slash = diagonals(attention.sum(2))  # [B,G,C+W-1]
        distance = (first + queries.shape[2] - 1)[:, None] - torch.arange(
            slash.shape[2], device=slash.device
        )
        slash = slash + _ALWAYS * (distance < self.near)[:, None]
        lines = crossed(slash, attention.shape[4] // self.block, self.block, self.segment)
        if not self.patterns:
            return lines
        newest = torch.arange(lines.shape[2], device=lines.device).float().expand_as(lines)
        rows = mean_queries(queries, self.block, self.segment // self.block)
        rows = rows.unflatten(1, (mean.shape[1], -1)).flatten(2, 3)  # [B,G,R·J,D]
        pooled = form.logits(rows @ mean.transpose(-1, -2)).amax(2)
        return self._by_head(lines, newest, pooled)

    def _by_head(self, *patterns: Tensor) -> Tensor:
        """Of values [B,G,N] of each pattern, those of each head's own."""
        if not self.patterns:
            return patterns[0]
        heads = zip(*(x.unbind(1) for x in patterns), strict=True)
        return torch.stack([x[p] for x, p in zip(heads, self.patterns, strict=True)], dim=1)

    def in_layers(self, program: Program) -> Mapping[int, Self]:
        """See Base: with the patterns that the search finds."""
        if not self.searched:
            return {}
        tokens = calibration_of(program).tokens[:, : program.facts.max_context]
        text = [(row[None], torch.ones(1, len(row) - 1)) for row in tokens[:_ROWS]]
        apart: dict[int, Tensor] = {}
        for row in observed(program, text):
            for layer, x in row.layers.items():
                apart[layer] = apart.get(layer, 0) + self.apart(x)
        best = {layer: counts.argmin(0).tolist() for layer, counts in apart.items()}
        number = [sum(found.count(p) for found in best.values()) for p in range(len(PATTERNS))]
        told = ", ".join(f"{n} {name}" for n, name in zip(number, PATTERNS, strict=True))
        program.facts.notes.append(f"minference: of {sum(number)} KV heads {told}")
        return {layer: self._with(found) for layer, found in best.items()}

    def apart(self, x: Observed) -> Tensor:
        """Of what a layer's attention reads of a row, how many outputs each pattern changes in each KV head [3,G]."""
        groups, length = x.keys.shape[1], x.keys.shape[2]
        half = self._halved(length)
        start = (length - half["segment"]) // half["block"] * half["block"]
        first = torch.tensor([start])
        queries = x.queries[:, :, start : start + half["segment"]].float()
        keys, values = x.keys.float(), x.values.float()
        at, number = start + torch.arange(queries.shape[2]), torch.arange(length)
        scores = x.form.scores(queries, at[None], keys, number[None, None])  # [1,G,R,T,S]
        want = x.form.shares(scores) @ values[:, :, None]
        found = []
        for pattern in range(len(PATTERNS)):
            one: Base = replace(self, **half)._with([pattern] * groups)
            slots, _ = chosen(one, queries, keys, number[None], first, x.form)
            read = torch.zeros(1, groups, length + 1).scatter(
                2, slots.where(slots >= 0, length), 1.0
            )
            read = read[..., :-1].bool() | (number >= start)
            some = scores.masked_fill(~read[:, :, None, None], LOWEST)
            off = (x.form.shares(some) @ values[:, :, None] - want).abs() > _APART
            found.append(off.sum((0, 2, 3, 4)))
        return torch.stack(found)

    def _halved(self, length: int) -> dict[str, Any]:
        """The sizes for a row of so many tokens: halved until they fit, and still whole blocks."""
        halvings = 0
        while 2 * (self.segment + self.budget) >> halvings > length:
            halvings += 1
        names = ("segment", "block", "columns", "observe", "sinks", "near")
        sizes = {n: getattr(self, n) for n in names}
        half = {n: max(min(1, size), size >> halvings) for n, size in sizes.items()}
        block, blocks = half["block"], (self.budget - self.columns) >> halvings
        half["segment"] -= half["segment"] % block
        half["observe"] = min(half["observe"], half["segment"])
        least = min(block, self.budget - self.columns)  # none, where all is columns
        return {**half, "budget": half["columns"] + max(least, blocks - blocks % block)}

    def _with(self, patterns: Sequence[int]) -> Self:
        """With these patterns of its heads."""
        found = replace(self)
        object.__setattr__(found, "patterns", tuple(patterns))
        return found


def crossed(slash: Tensor, blocks: int, block: int, segment: int) -> Tensor:
    """The best of the diagonals [B,G,M] (see `diagonals`) on which a query of the segment reads a key of the block:
    [B,G,NB]. Block b is crossed by those from its first slot to its last + segment - 1.
    """
    cut = slash[:, :, : blocks * block].unflatten(2, (blocks, block))
    whole, start = cut.amax(3), cut[..., : block - 1]
    shift = segment // block
    found = best_of_next(whole, shift)
    if block == 1:
        return found
    past_end = torch.nn.functional.pad(start.amax(3), (0, shift), value=0.0)[..., shift:]
    return torch.maximum(found, past_end)
