"""The precision of products while something learns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FLOAT32, BFLOAT16 = PRECISIONS = "float32", "bfloat16"
_LINEAR = (F.linear, torch.ops.aten.linear.default)


def products_in(precision: str) -> AbstractContextManager[Any]:
    """Within it products with weights are in one of PRECISIONS; all else stays as it is."""
    return _Bfloat16() if precision == BFLOAT16 else nullcontext()


class _Bfloat16(TorchFunctionMode):
    """Inputs and weights of products are rounded to bfloat16; sums and results are float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LINEAR:
            return func(*args, **(kwargs or {}))
        operands = [*args, *(kwargs or {}).values()]
        return func(*(None if one is None else one.bfloat16() for one in operands)).float()
