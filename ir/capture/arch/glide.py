"""GliDe (arXiv:2402.02082): a small decoder that also attends to keys and values of the last layers of its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead

HIDDEN = -1e4  # the product of a query and a key that it does not see


@dataclass(frozen=True)
class GlideConfig:
    """`layers`: the configuration of the decoder's layers, of transformers' Llama; its `vocab_size` is the target's.
    heads: that of the target's attention, likewise: KV heads, sizes and how keys are turned. taps: names of the
    target's keys and values, of each layer in turn. draft_vocabulary: the drafted tokens; None: all. own_embedding: it
    has an embedding, else it is given the target's, which a norm brings to the size that its layers work at.
    """

    layers: Any
    heads: Any
    taps: tuple[str, ...]
    draft_vocabulary: int | None = None
    own_embedding: bool = False

    @property
    def head(self) -> DraftHead:
        """What its sessions take and give: features are keys and values alone."""
        read = len(self.taps) * self.heads.num_key_value_heads * self.heads.head_dim
        embedding = 0 if self.own_embedding else self.layers.hidden_size
        return DraftHead("glide", self.taps, read, read, embedding, fused=False, reads=read)


class Reading(nn.Module):
    """Attention to keys and values of the target: it has queries and an output alone."""

    def __init__(self, width: int, heads: Any, bias: bool = False):
        super().__init__()
        self.count, self.groups = heads.num_attention_heads, heads.num_key_value_heads
        self.scale = heads.head_dim**-0.5
        self.q_proj = nn.Linear(width, self.count * heads.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.count * heads.head_dim, width, bias=False)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, turns: Any, seen: Tensor | None = None
    ) -> Tensor:
        """Of x [B,T,W] over keys and values [B,T,GD] of the token before each, 0 where there are none. turns: cosine
        and sine of each token's place [B,T,D]. seen: which keys a query sees [T,T], maybe none; None: those before,
        where they are.
        """
        q = self.q_proj(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.groups, -1)).transpose(1, 2) for y in (keys, values))
        q = turned(q, *turns)
        if seen is None:
            absent = (keys == 0).all(-1)[:, None, :, None].expand(*k.shape[:3], 1)
            k = torch.cat([k, torch.where(absent, HIDDEN, 0.0)], dim=-1)
            q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
            )
        else:
            blind = ~seen.any(-1, keepdim=True)
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen | blind, scale=self.scale, enable_gqa=True
            ).masked_fill(blind, 0)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def turned(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [B,H,T,D], each half of the channels with the other, by cosine and sine [B,T,D]."""
    a, b = q.chunk(2, dim=-1)
    return q * cos.unsqueeze(1) + torch.cat([-b, a], dim=-1) * sin.unsqueeze(1)


class Glide(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V]. Slot t holds token t + 1, and keys and values of token t. A
    layer adds x + SelfAttn(norm(x)), x + CrossAttn(x) and x + MLP(norm(x)); layer i of n looks into the target's i-th
    layer of its last n.
    """

    def __init__(self, config: GlideConfig):
        super().__init__()
        from transformers import AutoModel
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        c, layers = config, config.layers
        self.draft_head = c.head
        width = layers.hidden_size
        inner = AutoModel.from_config(layers)
        self.layers, self.rotary, self.norm = inner.layers, inner.rotary_emb, inner.norm
        for layer in self.layers:
            layer.cross_attn = Reading(width, c.heads)
        self.target_rotary = LlamaRotaryEmbedding(c.heads)
        self.embed_tokens = nn.Embedding(layers.vocab_size, width) if c.own_embedding else None
        self.embed_norm = None if c.own_embedding else nn.RMSNorm(width, layers.rms_norm_eps)
        self.stand_ins = StandIns(self.draft_head, self.draft_head.embedding)
        self.words = OwnVocabulary(layers.vocab_size, c.draft_vocabulary)
        self.lm_head = nn.Linear(width, self.words.count, bias=False)

    def said(
        self, x: Tensor, read: Tensor, positions: Tensor, seen: Tensor | None = None
    ) -> Tensor:
        """The logits [B,T,Vd] of embeddings x [B,T,W], in slots at positions [B,T], and of the target's keys and values
        `read` [B,T,F]; `seen` as of `Reading`.
        """
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        own, others = self.rotary(x, positions), self.target_rotary(x, positions + 1)
        parts = read.chunk(2 * len(self.layers), dim=-1)
        for i, layer in enumerate(self.layers):
            y = layer.input_layernorm(x)
            x = x + layer.self_attn(y, position_embeddings=own, attention_mask=None)[0]
            x = x + layer.cross_attn(x, parts[2 * i], parts[2 * i + 1], others, seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.lm_head(self.norm(x))
        return out

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, read = self.stand_ins(tokens)
        x = e if self.embed_tokens is None else self.embed_tokens(tokens)
        out: Tensor = self.words(self.said(x, read, positions))
        return out
