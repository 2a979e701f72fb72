"""EAGLE (arXiv:2401.15077): a layer that drafts by the last hidden state of its target, as published heads have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL


class Eagle1(nn.Module):
    """tokens [B,T], positions [B,T] -> logits and features of the next token [B,T,V+W]: a decoder layer without a norm
    before its attention, over the embedding of a token and what the target's output head read for the one before.

    layer: its configuration, of transformers. fc_bias: whether the product that joins the two has a bias.
    draft_vocabulary: tokens of its own; None: all.
    """

    def __init__(self, layer: Any, fc_bias: bool, draft_vocabulary: int | None = None):
        super().__init__()
        from transformers import AutoModel

        width = layer.hidden_size
        self.draft_head = DraftHead("eagle1", (FINAL,), width, width, width, fused=False)
        inner = AutoModel.from_config(layer)
        self.layers, self.rotary = inner.layers, inner.rotary_emb
        self.layers[0].input_layernorm = nn.Identity()
        self.stand_ins = StandIns(self.draft_head, width)
        self.fc = nn.Linear(2 * width, width, bias=fc_bias)
        self.words = OwnVocabulary(layer.vocab_size, draft_vocabulary)
        self.lm_head = nn.Linear(width, self.words.count, bias=False, device="meta")

    def guessed(self, e: Tensor, h: Tensor, positions: Tensor) -> Tensor:
        """The features of the next tokens, of embeddings and features [B,T,W]."""
        x = self.fc(torch.cat([e, h], dim=-1))
        turns = self.rotary(x, positions)
        y: Tensor = self.layers[0](x, attention_mask=None, position_embeddings=turns)
        return y

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, h = self.stand_ins(tokens)
        y = self.guessed(e, h, positions)
        return torch.cat([self.words(self.lm_head(y)), y], dim=-1)
