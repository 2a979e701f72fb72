"""A case: operands of one operator, made for any B, T and C; and what they are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.ir.ops.op import Op

LONGEST = 24
TRACE = (53, 57, 59)  # B, T, C while tracing: no operand has these sizes otherwise
SIZES = ((1, 1, 1), (2, 1, 9), (1, 5, 5), (3, 4, 11))


@dataclass(frozen=True)
class Case:
    """Operands of one operator for B, T, C; those at `fixed` are parameters, the same always."""

    name: str
    op: Op
    make: Callable[..., list[Any]]
    fixed: tuple[int, ...] = ()

    def operands(self, sizes: tuple[int, int, int]) -> list[Any]:
        return self.make(*sizes, np.random.default_rng(sum(sizes)))


def randn(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def constant(*shape: int) -> Tensor:
    return randn(np.random.default_rng(0), *shape)


def query_positions(rng: np.random.Generator, b: int, t: int, c: int) -> Tensor:
    """[B,T] consecutive from some start; the last token of every other row is padding."""
    starts = rng.integers(0, max(1, min(c, LONGEST) - t + 1), (b, 1))
    positions = torch.from_numpy(starts + np.arange(t))
    if t > 1:
        positions[::2, -1] = -1
    return positions


def key_positions(rng: np.random.Generator, b: int, c: int) -> Tensor:
    """[B,C] in any order, position 0 always there, a third of the slots empty."""
    found = np.stack([rng.permutation(np.arange(c)) for _ in range(b)])
    empty = (rng.random((b, c)) < 0.33) & (found > 0)
    return torch.from_numpy(np.where(empty, -1, found)) % LONGEST
