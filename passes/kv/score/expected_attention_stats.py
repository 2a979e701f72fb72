"""Expected Attention (arXiv:2510.00636) by the queries of other text, measured once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.ir.ops.attention import Form
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.score.expected_attention import ExpectedAttention


@dataclass(frozen=True)
class ExpectedAttentionStats(Tables, ExpectedAttention):
    """`expected-attention` whose mean and covariance of queries before RoPE are a table. A session then keeps no
    state for them, and its tokens can be rewound. kvpress' `ExpectedAttentionStatsPress` divides by the number of
    tokens less one.
    """

    key: ClassVar[str] = "expected-attention-stats"

    def sizes(self, width: int, heads: int) -> Sizes:
        """`mean` [H,D], `covariance` [H,D,D]."""
        return {"mean": (-1, width), "covariance": (-1, width, width)}

    def __call__(  # type: ignore[override]
        self,
        mean: Tensor,
        covariance: Tensor,
        mean_rotation: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        form: Form,
    ) -> Tensor:
        turn = mean_rotation[:, None]  # [B,1,D,D]
        query_mean = (mean[:, None] @ turn)[:, :, 0]  # [B,H,D]
        query_covariance = turn.transpose(2, 3) @ covariance @ turn
        return super().__call__(query_mean, query_covariance, keys, values, positions, form)

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Of all queries of the rows but the first `sinks` of each."""
        squares: dict[int, Tensor] = {}  # q^T q [H,D,D]
        sums: dict[int, Tensor] = {}  # [H,D]
        counts: dict[int, int] = {}
        for row in rows:
            for layer, x in row.layers.items():
                plain = x.queries if x.unrotated_queries is None else x.unrotated_queries
                q = plain[:, :, self.sinks :].transpose(0, 1).flatten(1, 2).double()  # [H,B T,D]
                squares[layer] = squares.get(layer, 0) + q.transpose(1, 2) @ q
                sums[layer] = sums.get(layer, 0) + q.sum(1)
                counts[layer] = counts.get(layer, 0) + q.shape[1]
        return {i: _moments(squares[i], sums[i], counts[i]) for i in squares}


def _moments(squares: Tensor, sums: Tensor, count: int) -> dict[str, Tensor]:
    mean = sums / max(1, count)
    covariance = squares / max(1, count) - mean[:, :, None] * mean[:, None]
    return {"mean": mean.float(), "covariance": covariance.float()}
