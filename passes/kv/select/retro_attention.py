"""RetroAttention (arXiv:2508.09001): tokens that are run again also read the pages that later tokens chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.ir.invariants import Invariant
from accel.ir.selection import Selection
from accel.passes.kv.select import SPARSE, Layout
from accel.passes.kv.select._pages import Where
from accel.passes.kv.select.quest import Quest


@dataclass(frozen=True)
class RetroAttention(Quest):
    """Pages as `quest` chooses them; of a call of several tokens, each also reads the pages that the tokens behind it
    chose, as far as these lie before it. So a call of one token is `quest`'s.

    The loop `retro-attention` runs the last tokens again with each new one: their keys and values in later layers are
    written anew, from attention over all that they and later tokens chose. The paper merges what each call adds into
    the older output, by its log-sum-exp, and keeps the pages seen; here attention over the union is computed anew,
    with the newest queries, which the paper leaves open.
    """

    breaks = SPARSE | {Invariant.PLAIN_KEYS, Invariant.DECODE_WIDTH}
    provides = frozenset({Invariant.LATER_READS})

    @property
    def layout(self) -> Layout:
        return Layout(selection=Selection(1))

    def choice(self, x: Mapping[str, Any], where: Where, heads: int) -> Tensor:
        return self.joined(super().choice(x, where, heads), x["parts"]["high"].shape[2])

    def joined(self, chosen: Tensor, pages: int) -> Tensor:
        """What each token chose of so many pages [B,G,T,K], then what those behind it did."""
        tokens = chosen.shape[2]
        numbers = torch.arange(pages, device=chosen.device)
        listed = torch.where(chosen < 0, pages, chosen)
        blank = torch.zeros_like(chosen[..., :1], dtype=torch.float32).expand(-1, -1, -1, pages + 1)
        marks = blank.scatter(3, listed, torch.ones_like(listed, dtype=torch.float32))[..., :pages]
        at = torch.arange(tokens, device=chosen.device)
        later = (at[:, None] < at).to(marks.dtype) @ marks  # [B,G,T,N]
        more = (later > 0) & (marks == 0) & (numbers < chosen[..., :1])
        found = torch.where(more, numbers, pages).sort(3).values
        found = found[..., : torch.sym_min((tokens - 1) * self.count, pages)]
        return torch.cat((chosen, torch.where(found < pages, found, -1)), dim=3)
