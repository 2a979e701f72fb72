"""Noise out of numbers: the same in every target, run and batch, since nothing is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

PRIME = 2**31 - 1  # squares of what is smaller fit into int64


def uniform(seed: int, *numbers: Tensor) -> Tensor:
    """A hash of integers, which broadcast, as numbers that look uniform on (0, 1): float32."""
    found = torch.full((), seed % PRIME, dtype=torch.int64)
    for number in numbers:
        found = (found.to(number.device) * 48271 + number + 1) % PRIME
        found = (found * found + 12345) % PRIME
    for _ in range(2):
        found = (found * 69621 + 1) % PRIME
        found = (found * found + 6789) % PRIME
    return (found.float() + 0.5) / (PRIME + 1)


def gumbel(seed: int, *numbers: Tensor) -> Tensor:
    """The same, with a standard Gumbel distribution."""
    return -torch.log(-torch.log(uniform(seed, *numbers).clamp(1e-9, 1 - 1e-7)))
