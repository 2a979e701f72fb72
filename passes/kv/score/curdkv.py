"""CurDKV (arXiv:2509.15038): keep tokens whose keys and values are long beside those near them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.axis import count
from accel.ir.errors import RecipeError, shown
from accel.passes.kv._shared.slots import places, sums
from accel.passes.kv.score import Base


@dataclass(frozen=True)
class CurDKV(Base):
    """Squared norms of keys and values, each as its share of the sum over a window of `window` tokens. `by`: product
    (of both), mean (of both), keys or values. `sinks`, `recent`: number of first and newest tokens to keep; the paper's
    code has no `recent`.

    The paper has leverage scores; its code has row norms, as here. Its optional projection to 20 channels is left out.
    """

    sinks: int = 4
    recent: int = 0
    window: int = count(16, most=1 << 20)
    by: str = "product"

    def __post_init__(self) -> None:
        if min(self.sinks, self.recent) < 0 or self.window < 1:
            raise RecipeError(
                f"kv.score.curdkv: sinks is {self.sinks}, recent {self.recent} and window {self.window}; give at "
                "least 0, 0 and 1"
            )
        if self.by not in ("product", "mean", "keys", "values"):
            raise RecipeError(
                f"kv.score.curdkv: by is {shown(self.by)}; give 'product', 'mean', 'keys' or 'values'"
            )

    def __call__(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        place = places(positions)
        segment = torch.where(positions >= 0, place // self.window, place)
        shares = []
        for x, name in ((keys, "keys"), (values, "values")):
            if self.by in (name, "product", "mean"):
                norms = x.float().square().sum(-1).masked_fill(positions < 0, 0)
                total = sums(norms.nan_to_num(nan=0.0, posinf=0.0), segment)
                shares.append(norms / total.clamp(min=1e-30))
        found = shares[0]
        if len(shares) == 2:
            found = shares[0] * shares[1] if self.by == "product" else (shares[0] + shares[1]) / 2
        return found / found.nan_to_num().sum(2, keepdim=True).clamp(min=1e-30)
