"""Batches that other processes draw before they are asked for: a GPU reads faster than one process draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class _Drawn(Dataset[Any]):
    def __init__(self, draw: Callable[..., Any]):
        self.draw = draw

    def __getitem__(self, given: tuple[Any, ...]) -> Any:
        return self.draw(*given)


def ahead(draw: Callable[..., Any], wanted: Iterable[Any], workers: int) -> Iterator[Any]:
    """`draw(*given)` for each of `wanted`, in order; by this process, when it is asked for, where `workers` is 0.

    `wanted` may have no end. The state of the global random numbers is left as it is.
    """
    loader: DataLoader[Any] = DataLoader(
        _Drawn(draw),
        sampler=wanted,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=workers > 0 and torch.cuda.is_available(),
        generator=torch.Generator(),
    )
    return iter(loader)
