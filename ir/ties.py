"""Which of equal values a choice of the largest takes: torch leaves it open, and may choose otherwise in a call of
another width; ONNX demands the first. A router of zeros, as some models begin with, gives nothing but ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TOPK = torch.ops.aten.topk.default


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """As `aten.topk`, sorted; of equal values the first."""
    values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


class FirstOfTies(TorchDispatchMode):
    """Within it a module chooses as a program does. `choices`: how many were made of several values; `tied`: of how
    many of them the last taken equals the first left out, so that another order of additions may turn it.
    """

    supports_higher_order_operators = True  # such as flex_attention: run as they are

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices = self.tied = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not TOPK:
            return func(*args, **(kwargs or {}))
        found = topk(*args, **(kwargs or {}))
        self._count(*args, **(kwargs or {}))
        return found

    def _count(
        self, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> None:
        if k < x.shape[dim]:
            ranked = torch.sort(x.float(), dim=dim, descending=largest).values
            last, out = ranked.select(dim, k - 1), ranked.select(dim, k)
            near = (last - out).abs() <= 1e-6 * last.abs()
            self.choices += near.numel()
            self.tied += int(near.sum())
