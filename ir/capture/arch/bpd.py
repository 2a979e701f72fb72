"""Blockwise parallel decoding (arXiv:1811.03115): heads that draft the next tokens independently, each by an addition
to the target's last hidden state and the target's own words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL


class Bpd(nn.Module):
    """tokens [B,T], positions [B,T] -> the logits of all heads, side by side [B,T,K V].

    Of h, what the target's output head read of token t, one layer of `inner` numbers for each head makes an addition
    for each; head i drafts token t + 2 + i by the norm of the sum. `lm_head` holds the target's words for `vocabulary`
    tokens; None: for all of `vocab_size`.
    """

    def __init__(
        self, vocab_size: int, width: int, heads: int, inner: int, vocabulary: int | None = None
    ):
        super().__init__()
        self.draft_head = DraftHead("bpd", (FINAL,), width, width, fused=False, independent=heads)
        self.stand_ins = StandIns(self.draft_head, 0)
        self.words = OwnVocabulary(vocab_size, vocabulary)
        self.hidden = nn.Linear(width, heads * inner)
        self.output = nn.Linear(heads * inner, heads * width)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, self.words.count, bias=False)

    def parts(self, h: Tensor) -> list[Tensor]:
        """The logits [B,T,Vd] of each head, of hidden states [B,T,W]."""
        u = self.output(torch.relu(self.hidden(h)))
        more = u.chunk(self.draft_head.independent, dim=-1)
        return [self.lm_head(self.norm(h + one)) for one in more]

    def said(self, h: Tensor) -> Tensor:
        """The same side by side [B,T,K,Vd]."""
        return torch.stack(self.parts(h), dim=-2)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        _, h = self.stand_ins(tokens)
        return torch.cat([self.words(one) for one in self.parts(h)], dim=-1)
