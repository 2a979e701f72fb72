"""TidalDecode (arXiv:2410.05076): two layers attend to everything and choose the tokens that later layers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant
from accel.ir.ops.choice import key_products
from accel.passes.kv.select import Layout
from accel.passes.kv.select._pages import Pages


@dataclass(frozen=True)
class TidalDecode(Pages):
    """Layer `dense_layers` (the first that is not dense) and layer `again` attend to all tokens, and choose those with
    the highest logits, anew for each token. Each later layer reads the list of the last of them. An `again` beyond the
    last layer is none.

    The query heads of a group share a list, by the sum of their logits; the paper gives each head its own. A token
    always reads itself, as in the paper's kernels.
    """

    tokens_read: int = 256
    page: int = option(1, one_of=(1,))
    again: int = option(9, least=1)

    relies = Pages.relies | {Invariant.ALL_LAYERS_RUN, Invariant.UNIFORM_SLOTS}
    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 7, "dense_layers": 0, "again": 9}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.again <= self.dense_layers:
            raise RecipeError(
                f"{self.full_name}: again is {self.again}; give a layer after the first that chooses, "
                f"{self.dense_layers} (dense_layers)"
            )

    @property
    def layout(self) -> Layout:
        return Layout(choosers=(self.dense_layers, self.again))

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        products: Tensor = key_products(queries, keys)
        return products

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.sum(2)
