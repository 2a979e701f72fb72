"""Mixture of Attentions (arXiv:2410.03804): a head that sums up keys and values of all layers of its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.glide import HIDDEN, turned
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.draft_head import DraftHead

Turns = tuple[Tensor, Tensor]  # cosine and sine of places


@dataclass(frozen=True)
class MoaSpecConfig:
    """`layer`: the sizes of the layers over tokens, a configuration of transformers' Llama, as wide as the target.
    summary: likewise of the layer over layers, as wide as a token's keys and values of one layer. groups: KV heads of
    the target. taps: names of its keys and values, of all layers in turn. draft_vocabulary: the drafted tokens; None:
    all.
    """

    layer: Any
    summary: Any
    groups: int
    taps: tuple[str, ...]
    draft_vocabulary: int | None = None

    @property
    def head(self) -> DraftHead:
        """What its sessions take and give: features are a token's summary, which no drafted token has."""
        width = self.layer.hidden_size
        read = self.summary.hidden_size * len(self.taps) // 2
        return DraftHead("moa-spec", self.taps, width, read, width, reads=width)


class Block(nn.Module):
    """A pre-norm decoder layer; what it attends to goes through the same norm."""

    def __init__(self, sizes: Any):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP

        width, self.size = sizes.hidden_size, sizes.head_dim
        self.count, self.groups = sizes.num_attention_heads, sizes.num_key_value_heads
        self.q_proj = nn.Linear(width, self.count * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.count * self.size, width, bias=False)
        self.mlp = LlamaMLP(sizes)
        self.input_layernorm = nn.RMSNorm(width, sizes.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, sizes.rms_norm_eps)

    def heads(self, y: Tensor) -> Tensor:
        """[B,T,HD] -> [B,H,T,D]."""
        out: Tensor = y.unflatten(-1, (-1, self.size)).transpose(1, 2)
        return out

    def finished(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [B,T,W] behind what its heads read [B,H,T,D]."""
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Tokens(Block):
    """Causal attention from token to token."""

    def forward(self, x: Tensor, turns: Turns, seen: Tensor | None = None) -> Tensor:
        """Of x [B,T,W]. seen: which tokens a token sees [T,T]; None: itself and those before."""
        y = self.input_layernorm(x)
        q, k, v = (self.heads(p(y)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(q, *turns), turned(k, *turns)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True
        )
        return self.finished(x, mixed)


class Summaries(Block):
    """Attention from tokens to summaries of tokens before them."""

    def forward(
        self, x: Tensor, summary: Tensor, turns: Turns, others: Turns, seen: Tensor | None = None
    ) -> Tensor:
        """Of x [B,T,W] over summaries [B,T,W] of the token before each, 0 where there are none. turns, others: of each
        token, and of the one before. seen: which summaries a token sees [T,T]; None: those before, where they are.
        """
        y, s = self.input_layernorm(x), self.input_layernorm(summary)
        q, k, v = self.heads(self.q_proj(y)), self.heads(self.k_proj(s)), self.heads(self.v_proj(s))
        q, k = turned(q, *turns), turned(k, *others)
        if seen is None:
            absent = (summary == 0).all(-1)[:, None, :, None].expand(*k.shape[:3], 1)
            k = torch.cat([k, torch.where(absent, HIDDEN, 0.0)], dim=-1)
            q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        mixed = F.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.size**-0.5,
            enable_gqa=True,
        )
        return self.finished(x, mixed)


class Layers(Block):
    """Attention from layer to layer of one token, of all to all."""

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        """Of x [B,T,L,W], by the places of layers [1,L,D]."""
        y = self.input_layernorm(x)

        def heads(project: nn.Module) -> Tensor:
            made = project(y).unflatten(-1, (-1, self.size))
            repeated = made.repeat_interleave(self.count // made.shape[-2], -2)
            out: Tensor = repeated.transpose(2, 3)  # [B,T,H,L,D]
            return out

        q, k, v = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        cos, sin = (one[:, None] for one in turns)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        # no operator of attention: tokens do not meet here, and nothing is cached
        weights = ((q @ k.transpose(-1, -2)) * self.size**-0.5).softmax(-1)
        x = x + self.o_proj((weights @ v).transpose(2, 3).flatten(3))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MoaSpec(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V]. Slot t holds token t + 1, and the summary of token t: what a
    layer over its keys and values in all layers of the target makes of them, on average. The target's output head reads
    what a layer over tokens and one over summaries make, without a norm.
    """

    def __init__(self, config: MoaSpecConfig):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        c, width = config, config.layer.hidden_size
        self.draft_head, self.groups = c.head, c.groups
        self.depth, self.inner = len(c.taps) // 2, c.summary.hidden_size
        self.layers, self.tokens, self.summaries = (
            Layers(c.summary),
            Tokens(c.layer),
            Summaries(c.layer),
        )
        self.summary_proj = nn.Linear(self.inner, width, bias=False)
        self.embed_norm = nn.RMSNorm(width, c.layer.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(c.layer)
        self.layer_rotary = LlamaRotaryEmbedding(c.summary)
        self.stand_ins = StandIns(self.draft_head, width)
        self.words = OwnVocabulary(c.layer.vocab_size, c.draft_vocabulary)
        self.lm_head = nn.Linear(width, self.words.count, bias=False, device="meta")

    def fuse(self, taps: Tensor) -> Tensor:
        """The summaries [B,T,W] of keys and values of all layers [B,T,F]."""
        parts = taps.unflatten(-1, (self.depth, 2, self.groups, -1))
        x = parts.transpose(3, 4).flatten(3)  # keys and values of a KV head are neighbours
        turns = self.layer_rotary(x, torch.arange(self.depth)[None])
        out: Tensor = self.summary_proj(self.layers(x, turns).mean(2))
        return out

    def features(
        self,
        x: Tensor,
        summary: Tensor,
        positions: Tensor,
        near: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """What the output head reads [B,T,W], of embeddings x [B,T,W] of tokens at positions [B,T], and of summaries
        [B,T,W] of the tokens before them. near: as `seen` of Tokens; seen: of Summaries.
        """
        turns, others = self.rotary(x, positions), self.rotary(x, positions - 1)
        x = self.tokens(self.embed_norm(x), turns, near)
        out: Tensor = self.summaries(x, summary, turns, others, seen)
        return out

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, summary = self.stand_ins(tokens, self.fuse)
        out: Tensor = self.words(self.lm_head(self.features(e, summary, positions + 1)))
        return out
