"""CurDKV (arXiv:2509.15038): keep tokens whose keys and values are long beside those near them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv._shared.slots import places, sums
from accel.passes.kv.score import Base
from accel.passes.kv.score._leverage import sketch


@dataclass(frozen=True)
class CurDKV(Base):
    """Squared norms of keys and values, each as its share of the sum over a window of `window` tokens. `by`: product
    (of both), mean (of both), keys or values. `sinks`, `recent`: number of first and newest tokens to keep; the paper's
    code has no `recent`.

    The paper has leverage scores; its code has row norms, as here. `channels` (0: none; the code's option: 20): keys
    and values are projected to so many random directions first, by `seed`, the same for both and for all heads.
    """

    sinks: int = option(4, least=0)
    recent: int = option(0, least=0)
    window: int = option(16, least=1, most=1 << 20)
    by: str = option("product", one_of=("product", "mean", "keys", "values"))
    channels: int = option(0, least=0, most=256)
    seed: int = option(0, least=0)
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"channels": 3},)

    def __call__(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        place = places(positions)
        segment = torch.where(positions >= 0, place // self.window, place)
        shares = []
        for x, name in ((keys, "keys"), (values, "values")):
            if self.by in (name, "product", "mean"):
                rows = x.float()
                if self.channels:
                    rows = rows @ sketch(1, x.shape[3], self.channels, self.seed, rows)[0]
                norms = rows.square().sum(-1).masked_fill(positions < 0, 0)
                total = sums(norms.nan_to_num(nan=0.0, posinf=0.0), segment)
                shares.append(norms / total.clamp(min=1e-30))
        found = shares[0]
        if len(shares) == 2:
            found = shares[0] * shares[1] if self.by == "product" else (shares[0] + shares[1]) / 2
        return found / found.nan_to_num().sum(2, keepdim=True).clamp(min=1e-30)
