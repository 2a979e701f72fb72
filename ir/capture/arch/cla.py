"""Cross-layer attention: a Llama in which the layers of a group share the keys and values of its first one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ClaConfig:
    """Sizes of a model. `factor`: layers that share one cache; 1 is the plain Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    factor: int = 2
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if (
            self.factor < 1
            or self.num_attention_heads % self.num_key_value_heads
            or self.head_dim % 2
        ):
            raise ValueError(
                f"factor {self.factor} must be 1 or more, {self.num_attention_heads} heads a multiple of "
                f"{self.num_key_value_heads} KV heads, head_dim {self.head_dim} even"
            )


class ClaLayer(nn.Module):
    """A pre-norm layer; where it owns no keys and values it is given those of the layer before."""

    def __init__(self, config: ClaConfig, owns: bool):
        super().__init__()
        c = config
        self.heads, self.groups, self.size = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.before, self.between = nn.RMSNorm(c.hidden_size, 1e-6), nn.RMSNorm(c.hidden_size, 1e-6)
        self.q = nn.Linear(c.hidden_size, self.heads * self.size, bias=False)
        self.kv = nn.ModuleList(
            nn.Linear(c.hidden_size, self.groups * self.size, bias=False) for _ in "kv" if owns
        )
        self.out = nn.Linear(self.heads * self.size, c.hidden_size, bias=False)
        self.gate, self.up = (
            nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in "gu"
        )
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(
        self, x: Tensor, angles: Tensor, shared: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B,T,E], angles [T,D/2], keys and values [B,G,T,D] of the owner -> x, the keys and values used."""
        h = self.before(x)
        q = turned(self._heads(self.q(h), self.heads), angles)
        if shared is None:
            k, v = (self._heads(project(h), self.groups) for project in self.kv)
            shared = turned(k, angles), v
        mixed = F.scaled_dot_product_attention(q, *shared, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), shared

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, self.size).transpose(1, 2)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE of [B,H,T,D]: channels i and i + D/2 turn by angles [T,D/2]."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Cla(nn.Module):
    """tokens [B,T] -> logits [B,T,V]. Layers 0, factor, 2 factor, … own keys and values; head tied."""

    speed: Tensor

    def __init__(self, config: ClaConfig):
        super().__init__()
        self.config, size = config, config.head_dim
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ClaLayer(config, owns=i % config.factor == 0) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, 1e-6)
        speed = config.rope_theta ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("speed", speed, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, shared = self.embed(tokens), None
        angles = torch.arange(tokens.shape[1])[:, None] * self.speed
        for index, layer in enumerate(self.layers):
            x, shared = layer(x, angles, shared if index % self.config.factor else None)
        return F.linear(self.norm(x), self.embed.weight)
