"""ClusterKV (arXiv:2412.03213): recall by clusters of keys, each with its mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.select._units import Units, k_means


@dataclass(frozen=True)
class Clusterkv(Units):
    """k-means by cosine over the keys of a prompt, and of every 320 generated tokens; a cluster is worth q · mean.

    It starts from keys at equal distances, where the paper takes random ones, and the query heads of a KV head
    choose together, by their mean query. `rounds`: of k-means.
    """

    rounds: int = option(20, least=0, most=100)

    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 10, "size": 4, "every": 8, "sinks": 2, "rounds": 2, "dense_layers": 0,
    }  # fmt: skip

    def group(self, keys: Tensor, real: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        return k_means(keys, real, units, self.rounds)
