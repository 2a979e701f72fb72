"""An any-order model of two streams (XLNet, arXiv:1906.08237; of any subset, arXiv:2504.20456), small, with rotary
positions in place of XLNet's relative ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.cla import turned


@dataclass(frozen=True)
class AnyOrderConfig:
    """Sizes of a model. `mask_token_id`: what a query holds in place of a token."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    mask_token_id: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.head_dim % 2 or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"head_dim {self.head_dim} must be even, mask_token_id {self.mask_token_id} one of "
                f"{self.vocab_size} tokens"
            )


class AnyOrderLayer(nn.Module):
    """A pre-norm layer, the same for both streams."""

    def __init__(self, config: AnyOrderConfig):
        super().__init__()
        c, wide = config, config.num_attention_heads * config.head_dim
        self.heads, self.size = c.num_attention_heads, c.head_dim
        self.before, self.between = nn.RMSNorm(c.hidden_size, 1e-6), nn.RMSNorm(c.hidden_size, 1e-6)
        self.q, self.k, self.v = (nn.Linear(c.hidden_size, wide, bias=False) for _ in "qkv")
        self.out = nn.Linear(wide, c.hidden_size, bias=False)
        self.gate, self.up = (
            nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in "gu"
        )
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def heads_of(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,T,E], angles [T,D/2] -> queries, keys and values [B,H,T,D]."""
        h = self.before(x)
        q, k, v = (
            project(h).view(*h.shape[:2], self.heads, self.size).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        return turned(q, angles), turned(k, angles), v

    def mixed(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [B,T,E] and what attention gave [B,H,T,D] -> x after the layer."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.between(x)
        after: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return after


class AnyOrder(nn.Module):
    """`two_streams` is the model. `forward` is its content stream alone, each token seeing those before it, tokens
    [B,T] -> logits [B,T,V]: to be captured, as what tokens see of each other is up to a call (`Session.guess`).
    """

    speed: Tensor

    def __init__(self, config: AnyOrderConfig):
        super().__init__()
        self.config, size = config, config.head_dim
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AnyOrderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, 1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        speed = config.rope_theta ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("speed", speed, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * self.speed
        for layer in cast("Iterable[AnyOrderLayer]", self.layers):
            q, k, v = layer.heads_of(x, angles)
            x = layer.mixed(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def two_streams(
        self, tokens: Tensor, places: Tensor, content_bias: Tensor, query_bias: Tensor
    ) -> Tensor:
        """Logits [B,K,V] of the tokens at `places` [K].

        tokens [B,N] of the content stream, at places 0 to N - 1. content_bias [N,N]: added to the scores of content
        tokens, query_bias [K,N] to those of queries, over the content: 0 where one sees the other, else -inf. A query
        holds the mask token, and sees itself beside what it sees of the content; no content sees a query.
        """
        g = self.embed(torch.full_like(places, self.config.mask_token_id)).expand(
            len(tokens), -1, -1
        )
        x, at = self.embed(tokens), torch.arange(tokens.shape[1])
        alone = torch.full((len(places), len(places)), -torch.inf).fill_diagonal_(0)
        for layer in cast("Iterable[AnyOrderLayer]", self.layers):
            q, k, v = layer.heads_of(x, at[:, None] * self.speed)
            gq, gk, gv = layer.heads_of(g, places[:, None] * self.speed)
            seen = F.scaled_dot_product_attention(q, k, v, content_bias)
            asked = F.scaled_dot_product_attention(
                gq, torch.cat((k, gk), 2), torch.cat((v, gv), 2), torch.cat((query_bias, alone), 1)
            )
            x, g = layer.mixed(x, seen), layer.mixed(g, asked)
        logits: Tensor = self.head(self.norm(g))
        return logits
