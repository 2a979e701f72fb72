"""Q-Filters (arXiv:2503.02812): keep the tokens whose keys lie along the direction that queries take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class QFilter(Tables, Base):
    """The score of a key is its product with the filter of its head: the first right singular vector of the head's
    queries after RoPE, turned towards their mean, and averaged over the heads of a group. kvpress' filters point the
    other way, and its score is minus the product.
    """

    key: ClassVar[str] = "q-filter"

    def sizes(self, width: int, heads: int) -> Sizes:
        return {"filter": (heads, width)}

    def __call__(self, keys: Tensor, filter: Tensor) -> Tensor:
        return (keys.float() @ filter[:, :, None]).squeeze(3)

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Of all queries of the rows."""
        squares: dict[int, Tensor] = {}  # q^T q [H,D,D]
        sums: dict[int, Tensor] = {}  # [H,D]
        groups: dict[int, int] = {}
        for row in rows:
            for layer, x in row.layers.items():
                q = x.queries.transpose(0, 1).flatten(1, 2).double()  # [H,B T,D]
                groups[layer] = x.keys.shape[1]
                squares[layer] = squares.get(layer, 0) + q.transpose(1, 2) @ q
                sums[layer] = sums.get(layer, 0) + q.sum(1)
        return {i: {"filter": _filter(squares[i], sums[i], groups[i])} for i in squares}


def _filter(squares: Tensor, sums: Tensor, groups: int) -> Tensor:
    """[G,D], from q^T q [H,D,D] and the sums of the queries [H,D]."""
    first = torch.linalg.eigh(squares).eigenvectors[:, :, -1]  # [H,D]
    sign = torch.where((first * sums).sum(1, keepdim=True) < 0, -1.0, 1.0)
    found: Tensor = (first * sign).unflatten(0, (groups, -1)).mean(1)
    return found.float()
