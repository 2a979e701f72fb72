"""Medusa (arXiv:2401.10774): heads that draft the next tokens independently, by the target's last hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL


class Block(nn.Module):
    """x + SiLU(W x + b), of x [..., E]."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    """tokens [B,T], positions [B,T] -> the logits of all heads, side by side [B,T,K V].

    Head i drafts token t + 2 + i from what the target's output head read of token t: blocks, and a product with the
    words of `vocabulary` tokens, all heads the same tokens; None: all of `vocab_size`.
    """

    def __init__(
        self, vocab_size: int, width: int, heads: int, blocks: int, vocabulary: int | None = None
    ):
        super().__init__()
        self.draft_head = DraftHead(
            "medusa", (FINAL,), width, width, fused=False, independent=heads
        )
        self.stand_ins = StandIns(self.draft_head, 0)
        words = OwnVocabulary(vocab_size, vocabulary)
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(Block(width) for _ in range(blocks)), nn.Linear(width, words.count, bias=False)
            )
            for _ in range(heads)
        )
        self.words = words

    def set_words(self, weight: nn.Parameter) -> None:
        """Let all heads say their tokens by the same words [Vd,W]."""
        for head in self.heads:
            head[-1].weight = weight  # type: ignore[index]

    def said(self, h: Tensor) -> Tensor:
        """The logits [B,T,K,Vd] of hidden states [B,T,W]."""
        return torch.stack([head(h) for head in self.heads], dim=-2)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        _, h = self.stand_ins(tokens)
        return torch.cat([self.words(head(h)) for head in self.heads], dim=-1)
