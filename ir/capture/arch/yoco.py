"""YOCO (arXiv:2405.05254): layers with a sliding window, then layers that all read one cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.cla import turned


@dataclass(frozen=True)
class YocoConfig:
    """Sizes of a model. The first half of the layers, rounded down, is the self-decoder: attention of as many KV heads
    as query heads over the newest `window` tokens. The others read the global cache of `num_key_value_heads`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if (
            self.num_hidden_layers < 2
            or self.window < 1
            or self.num_attention_heads % self.num_key_value_heads
            or self.head_dim % 2
        ):
            raise ValueError(
                f"num_hidden_layers {self.num_hidden_layers} must be 2 or more, window {self.window} 1 or more, "
                f"{self.num_attention_heads} heads a multiple of {self.num_key_value_heads} KV heads, head_dim "
                f"{self.head_dim} even"
            )


class YocoLayer(nn.Module):
    """A pre-norm layer; with a `window` it makes keys and values of its own, otherwise it is given the global ones."""

    def __init__(self, config: YocoConfig, window: int):
        super().__init__()
        c = config
        self.heads, self.size, self.window = c.num_attention_heads, c.head_dim, window
        width = self.heads * self.size
        self.before, self.between = nn.RMSNorm(c.hidden_size, 1e-6), nn.RMSNorm(c.hidden_size, 1e-6)
        self.q = nn.Linear(c.hidden_size, width, bias=False)
        self.kv = nn.ModuleList(nn.Linear(c.hidden_size, width, bias=False) for _ in "kv" if window)
        self.out = nn.Linear(width, c.hidden_size, bias=False)
        self.gate, self.up = (
            nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in "gu"
        )
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(
        self, x: Tensor, angles: Tensor, shared: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """x [B,T,E], angles [T,D/2], the global keys and values [B,G,T,D] -> x."""
        h = self.before(x)
        q = turned(heads(self.q(h), self.heads), angles)
        if shared is None:
            k, v = (heads(project(h), self.heads) for project in self.kv)
            place = torch.arange(x.shape[1])
            back = place[:, None] - place
            seen = (back >= 0) & (back < self.window)
            mixed = F.scaled_dot_product_attention(q, turned(k, angles), v, attn_mask=seen)
        else:
            mixed = F.scaled_dot_product_attention(q, *shared, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def heads(x: Tensor, count: int) -> Tensor:
    """[B,T,count D] -> [B,count,T,D]."""
    return x.view(*x.shape[:2], count, x.shape[2] // count).transpose(1, 2)


class Yoco(nn.Module):
    """tokens [B,T] -> logits [B,T,V]; the head is tied."""

    speed: Tensor

    def __init__(self, config: YocoConfig):
        super().__init__()
        c = self.config = config
        half = c.num_hidden_layers // 2
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.self_decoder = nn.ModuleList(YocoLayer(c, c.window) for _ in range(half))
        self.middle = nn.RMSNorm(c.hidden_size, 1e-6)
        width = c.num_key_value_heads * c.head_dim
        self.k, self.v = (nn.Linear(c.hidden_size, width, bias=False) for _ in "kv")
        self.cross = nn.ModuleList(YocoLayer(c, 0) for _ in range(c.num_hidden_layers - half))
        self.norm = nn.RMSNorm(c.hidden_size, 1e-6)
        speed = c.rope_theta ** -torch.linspace(0, 1, c.head_dim // 2)  # its last is 1/theta
        self.register_buffer("speed", speed, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * self.speed
        for layer in self.self_decoder:
            x = layer(x, angles)
        h, groups = self.middle(x), self.config.num_key_value_heads
        shared = turned(heads(self.k(h), groups), angles), heads(self.v(h), groups)
        for layer in self.cross:
            x = layer(x, angles, shared)
        return F.linear(self.norm(x), self.embed.weight)
