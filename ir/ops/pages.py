"""Pages, stretches of a cache's slots: reading them, and which of them a call wrote to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.op import Op


def _kv_pages(buffer: Tensor, first: Tensor, count: int, page: int) -> Tensor:
    slots = first.unsqueeze(1) * page + torch.arange(count * page, device=first.device)
    index = slots.clamp(max=buffer.shape[2] - 1)  # [B,count page]
    index = index.view(*index.shape[:1], 1, -1, *[1] * (buffer.dim() - 3))
    shape = (*buffer.shape[:2], count * page, *buffer.shape[3:])
    read: Tensor = buffer.gather(2, index.expand(shape)).unflatten(2, (count, page))
    return read


# buffer [B,G,C,..], first [B] -> [B,G,count,page,..]: the slots of `count` pages from page first[b] on; where
# the last one reaches past C, the last slot again
kv_pages = Op(
    "kv_pages",
    "(Tensor buffer, Tensor first, SymInt count, int page) -> Tensor",
    reference=_kv_pages,
    shape=lambda buffer, first, count, page: buffer.new_empty(
        (*buffer.shape[:2], count, page, *buffer.shape[3:])
    ),
)


def are_few_to_many(q_pos: Tensor, k_pos: Tensor, tokens: int, slots: int) -> bool:
    """What `few_to_many` gives, by shapes alone: q_pos [B,T], k_pos [B,S]."""
    return q_pos.shape[1] <= tokens and k_pos.shape[1] > slots


# q_pos [B,T], k_pos [B,S] -> bool []: whether T <= tokens and S > slots, few tokens that look at many
few_to_many = Op(
    "few_to_many",
    "(Tensor q_pos, Tensor k_pos, int tokens, int slots) -> Tensor",
    reference=lambda q_pos, *rest: q_pos.new_full(
        (), are_few_to_many(q_pos, *rest), dtype=torch.bool
    ),
    shape=lambda q_pos, *rest: q_pos.new_empty((), dtype=torch.bool),
)


# pages [B,G,T,K] of slots of a buffer [B,G,C,D] -> the same: they are read next, so where it lies in a mapped file a
# target may have them fetched
fetch_pages = Op(
    "fetch_pages",
    "(Tensor pages, Tensor buffer, int page) -> Tensor",
    reference=lambda pages, *rest: pages.clone(),
    shape=lambda pages, *rest: torch.empty_like(pages),
)


def pages_written(buffer: Tensor, q_pos: Tensor, slots: Tensor, page: int) -> tuple[Tensor, int]:
    """The pages of a buffer [B,G,C,..] that a call of q_pos [B,T] wrote to from slots [B] on: the first one's number
    [B], and how many; some that were full before, where the last one would lie past the end.
    """
    total = (buffer.shape[2] + page - 1) // page
    count = torch.sym_min((q_pos.shape[1] + page - 2) // page + 1, total)
    return (slots // page).clamp(max=total - count), count


def read_pages(pages: Tensor, page: int, slots: int) -> Tensor:
    """Which slots lie in the pages [B,G,T,K] that a query reads (-1: none): bool [B,G,T,slots]."""
    count = -(-slots // page)
    listed = torch.where(pages < 0, count, pages)
    read: Any = pages.new_zeros((*pages.shape[:3], count + 1), dtype=torch.bool).scatter(
        3, listed, True
    )
    slotwise: Tensor = read[..., :count].repeat_interleave(page, dim=3)[..., :slots]
    return slotwise
