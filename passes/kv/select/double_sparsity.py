"""Double Sparsity (arXiv:2408.07092): choose tokens by a few channels of their keys, those that make most of q · k."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Tables
from accel.ir.tables import Sizes as TableSizes
from accel.passes.kv.select import Sizes
from accel.passes.kv.select._pages import Pages


@dataclass(frozen=True)
class DoubleSparsity(Tables, Pages):
    """The score of a token is q · k over `channels` channels of its KV head. Pages hold one token.

    `labels`: these channels are kept beside the cache ([B,G,C,channels], float32), so that choosing reads nothing else;
    without, whole keys are read in place, and no memory is added. The table ranks the channels of each KV head by the
    mean of |q_c k_c| of a token's own query and key after RoPE, summed over the heads of the group (`qk` of the
    release). The release has channels and lists of each query head, and 4-bit labels; it scales scores, which changes
    no choice.
    """

    tokens_read: int = 1024
    page: int = option(1, one_of=(1,))
    channels: int = option(16, least=1, most=4096)
    labels: bool = True

    key: ClassVar[str] = "double-sparsity"
    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 7, "dense_layers": 0, "channels": 4}

    def sizes(self, width: int, heads: int) -> TableSizes:
        return {"order": (heads, width)}

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        return {"label": ("float32", (min(self.channels, width),))} if self.labels else {}

    def summary(self, keys: Tensor, order: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"label": self._taken(keys.float().squeeze(3), order)} if self.labels else {}

    def score(
        self, queries: Tensor, parts: dict[str, Tensor], keys: Tensor, order: Tensor
    ) -> Tensor:
        if self.labels:
            return self._taken(queries.float(), order) @ parts["label"].transpose(-1, -2)
        some = order[:, : self.channels]  # [G,r]
        mask = queries.new_zeros(order.shape).scatter(1, some, 1.0)
        return (queries * mask[:, None]) @ keys.transpose(-1, -2)

    def _taken(self, rows: Tensor, order: Tensor) -> Tensor:
        """The channels of rows [B,G,M,D] -> [B,G,M,r]."""
        some = order[None, :, None, : self.channels]
        return rows.gather(3, some.expand(rows.shape[0], -1, rows.shape[2], -1))

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Sums over all rows; the release keeps the last sample's."""
        sums: dict[int, Tensor] = {}
        for row in rows:
            for layer, x in row.layers.items():
                queries = x.queries.unflatten(1, (x.keys.shape[1], -1)).abs().sum(2)  # [B,G,T,D]
                products: Tensor = (queries * x.keys.abs()).double().sum((0, 2))
                sums[layer] = sums[layer] + products if layer in sums else products
        return {i: {"order": s.argsort(dim=1, descending=True)} for i, s in sums.items()}
