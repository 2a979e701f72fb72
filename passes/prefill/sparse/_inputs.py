"""What the functions of a sparse prefill method may name, each computed once and only where it is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.attention import Form

LOWEST = torch.finfo(torch.float32).min


class Inputs:
    """Values by name. A function of no arguments in place of a value is called at the first use of its name."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)

    def add(self, values: Mapping[str, Any]) -> None:
        self._values |= values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if callable(value):
            value = self._values[name] = value()
        return value

    def call(self, function: Callable[..., Any]) -> Any:
        """The function of the values that its parameters name."""
        names = inspect.signature(function).parameters
        return function(**{name: self[name] for name in names})


def last_logits(
    q: Tensor, k: Tensor, positions: Tensor, first: Tensor, last: int, form: Form
) -> Tensor:
    """Scores of the `last` queries of a segment, q [B,H,T,D], with all keys [B,G,C,D] -> [B,G,R,W,C]; the
    lowest number where the key is after the query, or empty.
    """
    rows = last_queries(q, last)
    own = positions.gather(1, first[:, None] + rows)  # [B,W]
    return form.scores(q[:, :, rows], own, k, positions[:, None])


def probabilities(logits: Tensor, form: Form) -> Tensor:
    """Attention of `logits` along the keys; a NaN attends to nothing."""
    return form.shares(torch.nan_to_num(logits, nan=LOWEST))


def diagonals(attention: Tensor) -> Tensor:
    """Sums of attention [...,W,C] of the last W queries over keys at one distance -> [...,C+W-1]. Entry c is the
    diagonal on which the last query reads slot c, and the query i before it slot c - i.
    """
    rows, slots = attention.shape[-2:]
    padded = torch.nn.functional.pad(attention.flip(-2), (0, rows)).flatten(-2)
    skewed = padded[..., : rows * (slots + rows - 1)]
    return skewed.reshape(*attention.shape[:-2], rows, slots + rows - 1).sum(-2)


def best_of_next(blocks: Tensor, count: int) -> Tensor:
    """The largest of each entry of [...,N] and the count - 1 after it, as many as there are: what a key block is
    worth to `count` neighbouring blocks of queries, where each reads one diagonal of blocks.
    """
    found, size = blocks, blocks.shape[-1]
    padded = torch.nn.functional.pad(blocks, (0, count), value=LOWEST)
    for shift in range(1, count):
        found = torch.maximum(found, padded[..., shift : shift + size])
    return found


def last_queries(q: Tensor, last: int) -> Tensor:
    """Numbers [W] of the `last` queries of q [B,H,T,D]; the first stands for those missing."""
    rows = torch.arange(last, device=q.device) + (q.shape[2] - last)
    return rows.clamp(min=0)


def mean_queries(q: Tensor, block: int, count: int) -> Tensor:
    """Means of q [B,H,T,D] over `count` blocks of `block` queries -> [B,H,count,D]; 0 for a block without any."""
    number = torch.arange(q.shape[2], device=q.device) // block
    inside = (number == torch.arange(count, device=q.device)[:, None]).float()  # [count,T]
    return (inside / inside.sum(1, keepdim=True).clamp(min=1)) @ q.float()


def ranks(x: Tensor) -> Tensor:
    """The place of each of [...,N] in descending order, from 0 on; equal ones in their order."""
    order = x.argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1, stable=True)


def share_before(weights: Tensor) -> Tensor:
    """The sum of the weights [...,N] that come before each in descending order: a prefix of these reaches a share s
    with the entries for which this is below s.
    """
    order = weights.argsort(dim=-1, descending=True, stable=True)
    ordered = weights.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    return before.gather(-1, order.argsort(dim=-1, stable=True))
