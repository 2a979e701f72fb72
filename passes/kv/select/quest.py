"""Quest (arXiv:2406.10774): the channel-wise minimum and maximum of a page's keys bound its attention scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.ops.choice import page_bounds, page_range
from accel.passes.kv.select import Sizes
from accel.passes.kv.select._build import Named
from accel.passes.kv.select._pages import Pages


@dataclass(frozen=True)
class Quest(Pages):
    """Attend to the pages with the highest bound on q · k: the sum over channels of max(q high, q low)."""

    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 12, "page": 4, "dense_layers": 0}

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        return {"high": ("float32", (width,)), "low": ("float32", (width,))}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        return {"high": keys.amax(3), "low": keys.amin(3)}

    def update(
        self, parts: Named, keys: Tensor, q_pos: Tensor, slots: Tensor, **table: Tensor
    ) -> Named:
        high, low = page_range(parts["high"], parts["low"], keys, q_pos, slots, self.page)
        return {"high": high, "low": low}

    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        bound: Tensor = page_bounds(queries, parts["high"], parts["low"])
        return bound
