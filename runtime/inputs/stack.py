"""Arrays of one session's rows, and those of another's behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def stacked(
    first: npt.NDArray[Any],
    second: npt.NDArray[Any],
    fill: float = 0,
    axis: int = 0,
    right: Sequence[int] = (),
) -> npt.NDArray[Any]:
    """Both along `axis`, as large along the others as the larger one. The smaller is padded with `fill` behind what it
    holds, along the axes of `right` before it.
    """
    sizes = [max(a, b) for a, b in zip(first.shape, second.shape, strict=True)]

    def padded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        short = [
            0 if i == axis else size - n
            for i, (size, n) in enumerate(zip(sizes, array.shape, strict=True))
        ]
        if not any(short):
            return array
        pads = [(n, 0) if i in right else (0, n) for i, n in enumerate(short)]
        return np.pad(array, pads, constant_values=fill)

    return np.concatenate([padded(first), padded(second)], axis=axis)
