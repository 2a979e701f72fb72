"""Choosing pages of a cache: the range of a page's keys, what it bounds, the best of those that a token sees; and
single tokens, by products with their keys, and by what heads vote.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accel.ir.ops.attention import Mask
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import Op
from accel.ir.ops.pages import kv_pages, pages_written
from accel.ir.ops.rope import rope


def _page_range(
    high: Tensor, low: Tensor, keys: Tensor, q_pos: Tensor, slots: Tensor, page: int
) -> tuple[Tensor, Tensor]:
    first, count = pages_written(keys, q_pos, slots, page)
    found = kv_pages.reference(keys, first, count, page)
    ends = (
        first.unsqueeze(1) + torch.arange(1, count + 1, device=first.device)
    ) * page  # [B,count]
    ahead = ends - slots.unsqueeze(1)
    filled = ((ahead > 0) & (ahead <= q_pos.shape[1]))[:, None, :, None]

    def stored(buffer: Tensor, new: Tensor) -> Tensor:
        before = kv_pages.reference(buffer, first, count, 1).squeeze(3)
        kept: Tensor = kv_append.reference(buffer, torch.where(filled, new, before), first)
        return kept

    return stored(high, found.amax(3)), stored(low, found.amin(3))


# high, low [B,G,N,D] of N = C/page pages of keys [B,G,C,D], with the range of each channel computed anew in the
# pages that a call of q_pos [B,T] fills, which wrote its keys from slots [B] on. A lowering may write in place: the
# old ones are not read afterwards
page_range = Op(
    "page_range",
    "(Tensor high, Tensor low, Tensor keys, Tensor q_pos, Tensor slots, int page) -> (Tensor, Tensor)",
    reference=_page_range,
    shape=lambda high, low, *rest: (high.new_empty(high.shape), low.new_empty(low.shape)),
)

# q [B,G,M,D], high, low [B,G,N,D] -> [B,G,M,N]: the most that q · k can be of a key between low and high
page_bounds = Op(
    "page_bounds",
    "(Tensor q, Tensor high, Tensor low) -> Tensor",
    reference=lambda q, high, low: (
        q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)
    ),
    shape=lambda q, high, low: q.new_empty((*q.shape[:3], high.shape[2])),
)


def pages_before(
    q_pos: Tensor, k_pos: Tensor, slots: Tensor, pages: int, page: int, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Which of `pages` pages each token of a call may choose, bool [B,1,T,pages], and its own [B,1,T,1].
    Positions of the call [B,T] and in the slots [B,C], the call's first slots [B].
    """
    ahead = torch.arange(q_pos.shape[1], device=slots.device)
    own = ((slots[:, None] + ahead) // page)[:, None, :, None]
    numbers = torch.arange(pages, device=slots.device)
    ends = (numbers * page + page - 1).clamp(max=k_pos.shape[1] - 1)
    newest = k_pos.index_select(1, ends)[:, None, None]  # a page's newest position
    return mask.visible(q_pos[:, None, :, None], newest) & (numbers < own), own


def _best_pages(
    worth: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    slots: Tensor,
    count: int,
    page: int,
    mask: str,
    window: int,
) -> Tensor:
    seen, own = pages_before(q_pos, k_pos, slots, worth.shape[3], page, Mask(mask, window))
    worth = torch.where(worth.isnan(), math.inf, worth)  # no number: attention shall see it
    worth = worth.masked_fill(~seen, -math.inf)
    best, pages = worth.sort(dim=3, descending=True, stable=True)
    pages = pages.masked_fill(best == -math.inf, -1)[..., : count - 1]
    return torch.cat((own.expand(-1, worth.shape[1], -1, -1), pages), dim=3)


# worth [B,G,T,N] of pages, positions of the call [B,T] and in the slots [B,C], slots [B] -> the pages that each token
# reads [B,G,T,K], K = min(count, N + 1): its own, then the best of those before it that the mask (see `Mask`) shows
# it, the earlier one of equals; -1 where there are fewer. NaN is worth most, -inf nothing.
best_pages = Op(
    "best_pages",
    "(Tensor worth, Tensor q_pos, Tensor k_pos, Tensor slots, int count, int page, str mask, int window) -> Tensor",
    reference=_best_pages,
    shape=lambda worth, q_pos, k_pos, slots, count, *rest: worth.new_empty(
        (*worth.shape[:3], torch.sym_min(count - 1, worth.shape[3]) + 1), dtype=torch.int64
    ),
)


def _key_products(
    q: Tensor,
    keys: Tensor,
    at: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    if at is not None:
        keys = rope.reference(keys, at, cos, sin, interleaved)
    return q.float() @ keys.float().transpose(-1, -2)


# q [B,G,M,D], keys [B,G,C,D] -> [B,G,M,C] float32: their products, the keys turned (see `rope`) to row at [B,C] of the
# tables cos, sin [N,R/2] before, where these are given.
key_products = Op(
    "key_products",
    "(Tensor q, Tensor keys, Tensor? at=None, Tensor? cos=None, Tensor? sin=None, bool interleaved=False) -> Tensor",
    reference=_key_products,
    shape=lambda q, keys, *rest, **more: q.new_empty(
        (*q.shape[:3], keys.shape[2]), dtype=torch.float32
    ),
)


def _head_votes(scores: Tensor, seen: Tensor, steps: float) -> Tensor:
    scores = (scores * steps).round() / steps
    lowest = torch.finfo(scores.dtype).min / 2
    shares = scores.masked_fill(~seen, lowest).log_softmax(-1)
    return shares.logsumexp(1, keepdim=True).masked_fill(~seen, -torch.inf)


# scores [B,H,T,C] in float32, rounded to 1/steps, and what each token may choose (seen, bool [B,1,T,C]) ->
# [B,1,T,C]: the logarithm of the sum over heads of their softmax over what is seen; -inf elsewhere
head_votes = Op(
    "head_votes",
    "(Tensor scores, Tensor seen, float steps) -> Tensor",
    reference=_head_votes,
    shape=lambda scores, seen, steps: torch.empty_like(scores[:, :1]),
)
