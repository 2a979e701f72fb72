"""Gemma 4's assistant: layers of queries alone, over keys and values of its target's last layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.capture.arch.glide import HIDDEN
from accel.ir.draft_head import DraftHead
from accel.ir.taps import FINAL, last_keys, last_values

FULL, SLIDING = "full_attention", "sliding_attention"
TAPS = (FINAL, *(one(window) for window in (False, True) for one in (last_keys, last_values)))


@dataclass(frozen=True)
class AssistantConfig:
    """`layers`: the configuration of the layers, of transformers' Gemma 4. target_width: of the target's hidden states.
    centroids: how many, and how many of them are chosen, whose tokens are said; none: all tokens are.
    """

    layers: Any
    target_width: int
    centroids: tuple[int, int] | None = None

    def cache(self, kind: str) -> tuple[int, int]:
        """KV heads and their size, of the layers of a kind, of which there is one; 0: there is none."""
        found = [i for i, one in enumerate(self.layers.layer_types) if one == kind]
        if not found:
            return 0, 0
        layer = self.layers.per_layer_config[found[0]]
        return layer.num_key_value_heads, layer.head_dim

    @property
    def head(self) -> DraftHead:
        """Features: the hidden state of the token before, then keys and values."""
        wide, read = self.target_width, 0
        for kind in (FULL, SLIDING):
            groups, size = self.cache(kind)
            read += 2 * groups * size
        return DraftHead(
            "gemma4-assistant",
            TAPS,
            wide + read,
            wide + read,
            wide,
            fused=False,
            block=1,
            hidden=wide,
            reads=read,
        )


class Gemma4Assistant(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V] of the next token, and behind them the hidden state [B,T,E] with
    which that one is read. Keys and values of a slot are those of its features, 0 where it is a query.
    """

    tokens_of: Tensor  # [C,V/C], of each centroid

    def __init__(self, config: AssistantConfig):
        super().__init__()
        from transformers import AutoModel

        c, layers = config, config.layers
        self.draft_head, self.config = c.head, c
        inner = AutoModel.from_config(layers)
        self.layers, self.rotary, self.norm = inner.layers, inner.rotary_emb, inner.norm
        width = layers.hidden_size
        self.stand_ins = StandIns(self.draft_head, c.target_width)
        self.pre_projection = nn.Linear(2 * c.target_width, width, bias=False)
        self.post_projection = nn.Linear(width, c.target_width, bias=False)
        self.lm_head = nn.Linear(width, layers.vocab_size, bias=False)
        self.centroids = None
        if c.centroids is not None:
            self.centroids = nn.Linear(width, c.centroids[0], bias=False)
            shape = c.centroids[0], layers.vocab_size // c.centroids[0]
            self.register_buffer("tokens_of", torch.zeros(shape, dtype=torch.int64))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, features = self.stand_ins(tokens)
        h, read = (
            features[..., : self.config.target_width],
            features[..., self.config.target_width :],
        )
        x = self.pre_projection(torch.cat([e, h], dim=-1))
        kinds = self.config.layers.layer_types
        sizes = [self.config.cache(kind) for kind in (FULL, SLIDING) for _ in range(2)]
        parts = read.split([groups * size for groups, size in sizes], dim=-1)
        caches = {
            kind: _cache(parts[2 * i], parts[2 * i + 1], sizes[2 * i][0])
            for i, kind in enumerate((FULL, SLIDING))
        }
        turns = {kind: self.rotary(x, positions, kind) for kind in caches}
        window = (
            self.config.layers.sliding_window + 2
        )  # the newest key lies one place before the query
        for layer, kind in zip(self.layers, kinds, strict=True):
            y = self._attention(
                layer, x, caches[kind], turns[kind], window if kind == SLIDING else 0
            )
            x = x + layer.post_attention_layernorm(y)
            y = layer.mlp(layer.pre_feedforward_layernorm(x))
            x = (x + layer.post_feedforward_layernorm(y)) * layer.layer_scalar
        last = self.norm(x)
        return torch.cat([self._words(last), self.post_projection(last)], dim=-1)

    def _words(self, x: Tensor) -> Tensor:
        """The logits [B,T,V]; below all others where a token's centroid is not chosen, whose words are not read."""
        if self.centroids is None or self.config.centroids is None:
            logits: Tensor = self.lm_head(x)
            return logits
        near = self.centroids(x).topk(self.config.centroids[1], dim=-1).indices
        ids = self.tokens_of[near].flatten(-2)
        said = (F.embedding(ids, self.lm_head.weight) @ x[..., None])[..., 0]
        low = said.amin(-1, keepdim=True) - 1
        return low.repeat(1, 1, self.tokens_of.numel()).scatter(-1, ids, said)

    def _attention(
        self, layer: Any, x: Tensor, cache: tuple[Tensor, Tensor], turns: Any, window: int
    ) -> Tensor:
        """Of queries from x over keys and values [B,G,T,D]; of the newest `window` places, 0: of all."""
        from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

        own, (k, v) = layer.self_attn, cache
        q = own.q_proj(layer.input_layernorm(x)).unflatten(-1, (-1, own.head_dim))
        q = apply_rotary_pos_emb(own.q_norm(q), *turns, unsqueeze_dim=2).transpose(1, 2)
        q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        seen = None
        if window:
            place = torch.arange(x.shape[1])
            back = place[:, None] - place
            seen = (back >= 0) & (back < window)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=own.scaling, enable_gqa=True
        )
        found: Tensor = own.o_proj(mixed.transpose(1, 2).flatten(2))
        return found


def _cache(keys: Tensor, values: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B,G,T,D] of [B,T,GD]. A key that is 0 has one more number, by which no query sees it."""
    k, v = (y.unflatten(-1, (groups, -1)).transpose(1, 2) for y in (keys, values))
    absent = (keys == 0).all(-1)[:, None, :, None].expand(*k.shape[:3], 1)
    return torch.cat([k, torch.where(absent, HIDDEN, 0.0)], dim=-1), v
