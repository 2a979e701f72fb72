"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.passes.kv.select import Sizes
from accel.passes.kv.select._pages import Pages


@dataclass(frozen=True)
class Template(Pages):
    """What is known of a page, and its score: here, the mean of its keys."""

    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 12, "page": 4, "dense_layers": 0}

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        return {"mean": ("float32", (width,))}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.float().mean(3)}

    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return queries.float() @ parts["mean"].transpose(-1, -2)
