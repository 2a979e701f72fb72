"""EAGLE-3 (arXiv:2503.01840): a layer that drafts by three hidden states of its target, as published heads have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and forms of a head. `layer`: its decoder layer's configuration, of transformers; its `vocab_size` is the
    target's. taps: names of the target's outputs, each `tap_width` numbers wide. draft_vocabulary: the head's own
    tokens; None: all. own_embedding: it has an embedding, else it is given the target's, `embedding` numbers wide.
    residual_normed: the residual stream begins behind `hidden_norm`. tap_norms: a norm of each tap. all_taps_norm: a
    norm of all of them together. output_normed: the features of a drafted token are those behind the last norm.

    parallel: how many tokens are drafted in one call (P-EAGLE, arXiv:2602.01469), all but the first in slots that hold
    the token `mask`; 0: one after the other.
    """

    layer: Any
    taps: tuple[str, ...]
    tap_width: int
    draft_vocabulary: int | None = None
    own_embedding: bool = True
    embedding: int = 0
    residual_normed: bool = False
    tap_norms: bool = False
    all_taps_norm: bool = False
    output_normed: bool = False
    parallel: int = 0
    mask: int = 0

    @property
    def head(self) -> DraftHead:
        """What its sessions take and give."""
        width = self.layer.hidden_size
        all_taps = self.tap_width * len(self.taps)
        embedding = 0 if self.own_embedding else self.embedding
        if self.parallel:
            kind = "peagle", self.taps, width, all_taps, embedding
            return DraftHead(*kind, mask=self.mask, parallel=self.parallel)
        return DraftHead("eagle3", self.taps, width, all_taps, embedding)


class Eagle3(nn.Module):
    """tokens [B,T], positions [B,T] -> logits and features of the next token [B,T,V+W]. What a call gives of tokens
    has stand-ins here (`StandIns`).
    """

    def __init__(self, config: Eagle3Config):
        super().__init__()
        from transformers import AutoModel

        c, layer = config, config.layer
        self.draft_head = c.head
        self.residual_normed, self.output_normed = c.residual_normed, c.output_normed
        width, eps = layer.hidden_size, layer.rms_norm_eps
        inner = AutoModel.from_config(layer)
        self.midlayer, self.rotary = inner.layers[0], inner.rotary_emb
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            new = nn.Linear(2 * width, old.out_features, bias=old.bias is not None)
            setattr(attention, name, new)
        self.midlayer.hidden_norm = nn.RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(layer.vocab_size, width) if c.own_embedding else None
        self.stand_ins = StandIns(self.draft_head, self.draft_head.embedding)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(c.tap_width, eps) for _ in c.taps if c.tap_norms)
        self.input_norm = nn.RMSNorm(c.tap_width * len(c.taps), eps) if c.all_taps_norm else None
        self.fc = nn.Linear(c.tap_width * len(c.taps), width, bias=False)
        self.mask = c.mask
        if c.parallel:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, c.tap_width * len(c.taps)))
        self.norm = nn.RMSNorm(width, eps)
        self.words = OwnVocabulary(layer.vocab_size, c.draft_vocabulary)
        self.lm_head = nn.Linear(width, self.words.count, bias=False)

    def fuse(self, taps: Tensor) -> Tensor:
        """The features [B,T,W] of taps [B,T,F]."""
        if self.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        out: Tensor = self.fc(taps)
        return out

    def beginning(self, e: Tensor, h: Tensor) -> Tensor:
        """What attention reads [B,T,2W] of embeddings and features [B,T,W]."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(e), layer.hidden_norm(h)], dim=-1)

    def ending(self, h: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [B,T,Vd] and features of the next token [B,T,W], of features and attention's output [B,T,W]."""
        layer = self.midlayer
        y = (layer.hidden_norm(h) if self.residual_normed else h) + mixed
        y = y + layer.mlp(layer.post_attention_layernorm(y))
        last = self.norm(y)
        return self.lm_head(last), last if self.output_normed else y

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, h = self.stand_ins(tokens, self.fuse)
        if self.embed_tokens is not None:
            e = self.embed_tokens(tokens)
        if self.draft_head.parallel:
            h = torch.where((tokens == self.mask)[..., None], self.fuse(self.mask_hidden), h)
        attention = self.midlayer.self_attn
        x, turns = self.beginning(e, h), self.rotary(h, positions)
        mixed = attention(hidden_states=x, position_embeddings=turns, attention_mask=None)[0]
        logits, features = self.ending(h, mixed)
        return torch.cat([self.words(logits), features], dim=-1)
