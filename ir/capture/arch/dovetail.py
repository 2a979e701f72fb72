"""Dovetail (arXiv:2412.18934): layers that draft by the last hidden state of their target, which a gate mixes with the
embedding of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL


class GatedFusion(nn.Module):
    """Embeddings and features [B,T,W] -> [B,T,W]: each number is the feature's share or the embedding's, by a gate that
    reads both.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps)
        self.w1 = nn.Linear(width, width, bias=False)
        self.w2 = nn.Linear(width, width, bias=False)
        self.wz = nn.Linear(2 * width, width, bias=False)

    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        feature, embedding = self.w1(h), F.silu(self.w2(self.norm(e)))
        z = torch.sigmoid(self.wz(torch.cat([feature, embedding], dim=-1)))
        mixed: Tensor = z * feature + (1 - z) * embedding
        return mixed


class Dovetail(nn.Module):
    """tokens [B,T], positions [B,T] -> logits and features of the next token [B,T,V+W]: decoder layers over the gated
    fusion of the embedding of a token and what the target's output head read for the one before.

    layers: their configuration, of transformers. draft_vocabulary: tokens of its own; None: all.
    """

    def __init__(self, layers: Any, draft_vocabulary: int | None = None):
        super().__init__()
        from transformers import AutoModel

        width = layers.hidden_size
        self.draft_head = DraftHead("dovetail", (FINAL,), width, width, width, fused=False)
        inner = AutoModel.from_config(layers)
        self.layers, self.rotary = inner.layers, inner.rotary_emb
        self.layers[0].input_layernorm = nn.Identity()
        self.stand_ins = StandIns(self.draft_head, width)
        self.fusion = GatedFusion(width, layers.rms_norm_eps)
        self.words = OwnVocabulary(layers.vocab_size, draft_vocabulary)
        self.lm_head = nn.Linear(width, self.words.count, bias=False, device="meta")

    def guessed(self, e: Tensor, h: Tensor, positions: Tensor) -> Tensor:
        """The features of the next tokens, of embeddings and features [B,T,W]."""
        y: Tensor = self.fusion(e, h)
        turns = self.rotary(y, positions)
        for layer in self.layers:
            y = layer(y, attention_mask=None, position_embeddings=turns)
        return y

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, h = self.stand_ins(tokens)
        y = self.guessed(e, h, positions)
        return torch.cat([self.words(self.lm_head(y)), y], dim=-1)
