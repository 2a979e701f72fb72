"""LongSpec (arXiv:2502.17421): a decoder layer with a window over its own tokens, which also attends to keys and values
of the last layer of its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.glide import Reading, turned
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead


@dataclass(frozen=True)
class LongspecConfig:
    """`layer`: the sizes of the target's layers, a configuration of transformers' Llama: width, heads, and how keys are
    turned. window: tokens that a token attends to in the head's own attention, itself included. taps: names of the
    target's keys and values. embed_norm: a norm brings the target's embedding to the size that its output head reads.
    """

    layer: Any
    window: int
    taps: tuple[str, ...]
    embed_norm: bool = False

    @property
    def head(self) -> DraftHead:
        """What its sessions take and give: features are keys and values alone."""
        read = 2 * self.layer.num_key_value_heads * self.layer.head_dim
        width = self.layer.hidden_size
        return DraftHead("longspec", self.taps, read, read, width, fused=False, reads=read)


class Windowed(nn.Module):
    """Causal attention to the newest tokens."""

    def __init__(self, layer: Any, window: int):
        super().__init__()
        self.count, self.groups = layer.num_attention_heads, layer.num_key_value_heads
        self.size, self.window, width = layer.head_dim, window, layer.hidden_size
        self.q_proj = nn.Linear(width, self.count * self.size)
        self.k_proj = nn.Linear(width, self.groups * self.size)
        self.v_proj = nn.Linear(width, self.groups * self.size)
        self.o_proj = nn.Linear(self.count * self.size, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """x [B,T,W], and cosine and sine of each token's place [B,T,D]."""
        made = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in made)
        place = torch.arange(x.shape[1])
        back = place[:, None] - place
        mixed = F.scaled_dot_product_attention(
            turned(q, *turns),
            turned(k, *turns),
            v,
            attn_mask=(back >= 0) & (back < self.window),
            enable_gqa=True,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Longspec(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V]. Slot t holds token t + 1, and keys and values of token t. The
    layer adds x + SelfAttn(norm(x)), x + CrossAttn(norm(x)) and x + MLP(norm(x)); the target's output head reads that
    without a norm.
    """

    def __init__(self, config: LongspecConfig):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

        layer = config.layer
        self.draft_head, width = config.head, layer.hidden_size
        self.self_attn = Windowed(layer, config.window)
        self.cross_attn = Reading(width, layer, bias=True)
        self.mlp = LlamaMLP(layer)
        self.input_layernorm, self.post_self_attention_layernorm, last = (
            nn.RMSNorm(width, layer.rms_norm_eps) for _ in range(3)
        )
        self.post_cross_attention_layernorm = last
        self.embed_norm = nn.RMSNorm(width, layer.rms_norm_eps) if config.embed_norm else None
        self.rotary = LlamaRotaryEmbedding(layer)
        self.stand_ins = StandIns(self.draft_head, width)
        self.words = OwnVocabulary(layer.vocab_size, None)
        self.lm_head = nn.Linear(width, layer.vocab_size, bias=False, device="meta")

    def said(
        self, x: Tensor, read: Tensor, positions: Tensor, seen: Tensor | None = None
    ) -> Tensor:
        """The logits [B,T,V] of embeddings x [B,T,W] of tokens at positions [B,T], and of the target's keys and values
        `read` [B,T,F]; `seen` as of `Reading`.
        """
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        turns = self.rotary(x, positions)
        x = x + self.self_attn(self.input_layernorm(x), turns)
        y = self.post_self_attention_layernorm(x)
        x = x + self.cross_attn(y, *read.chunk(2, dim=-1), turns, seen)
        x = x + self.mlp(self.post_cross_attention_layernorm(x))
        out: Tensor = self.lm_head(x)
        return out

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, read = self.stand_ins(tokens)
        return self.said(e, read, positions + 1)
