"""Sizes as kernels take them."""

from __future__ import annotations

from torch import Tensor


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def rows(tensor: Tensor) -> Tensor:
    """The tensor with a last axis that lies together."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
