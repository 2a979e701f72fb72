"""TokenFormer (arXiv:2410.23168): linear layers are attention over parameter tokens, of which more can be added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.cla import turned
from accel.ir.capture.arch.yoco import heads

_LEAST = 1e-12  # of a norm, where all scores are 0


@dataclass(frozen=True)
class TokenFormerConfig:
    """Sizes of a model. attention_tokens: parameter tokens of each projection of attention. mlp_tokens: of an MLP."""

    vocab_size: int
    hidden_size: int
    attention_tokens: int
    mlp_tokens: int
    num_hidden_layers: int
    num_attention_heads: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of {self.num_attention_heads} heads, each of an "
                "even number of channels"
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads


class Pattention(nn.Module):
    """[B,T,E_in] -> [B,T,E_out]: scores with `keys` [n,E_in], over their norm and times `scale`, through GELU, weigh
    `values` [n,E_out].
    """

    scale: Tensor

    def __init__(self, inner: int, outer: int, tokens: int):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(tokens, inner) * inner**-0.5)
        self.values = nn.Parameter(torch.randn(tokens, outer) * tokens**-0.5)
        self.register_buffer("scale", torch.tensor(float(tokens) ** 0.5))

    def grow(self, tokens: int) -> None:
        """Add parameter tokens that change nothing yet: their scores are 0. The scale stays that of the first tokens,
        or all weights would change.
        """
        more = torch.zeros(tokens, self.keys.shape[1])
        free = torch.randn(tokens, self.values.shape[1]) * len(self.values) ** -0.5
        self.keys = nn.Parameter(torch.cat([self.keys.detach(), more]))
        self.values = nn.Parameter(torch.cat([self.values.detach(), free]))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.keys)
        norm = scores.norm(dim=-1, keepdim=True).clamp(min=_LEAST)
        return F.linear(F.gelu(self.scale * scores / norm), self.values.T)


class TokenFormerLayer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, config: TokenFormerConfig):
        super().__init__()
        c = config
        self.heads = c.num_attention_heads
        self.before, self.between = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)
        self.q, self.k, self.v, self.out = (
            Pattention(c.hidden_size, c.hidden_size, c.attention_tokens) for _ in range(4)
        )
        self.mlp = Pattention(c.hidden_size, c.hidden_size, c.mlp_tokens)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [B,T,E], angles [T,D/2] -> x."""
        h = self.before(x)
        q, k, v = (heads(project(h), self.heads) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            turned(q, angles), turned(k, angles), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.between(x))
        return out


class TokenFormer(nn.Module):
    """tokens [B,T] -> logits [B,T,V]."""

    speed: Tensor

    def __init__(self, config: TokenFormerConfig):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(TokenFormerLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.LayerNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        speed = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        self.register_buffer("speed", speed, persistent=False)

    def grow(self, tokens: int) -> None:
        """Let every layer have so many parameter tokens more, without a change of what it computes."""
        for module in self.modules():
            if isinstance(module, Pattention):
                module.grow(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * self.speed
        for layer in self.layers:
            x = layer(x, angles)
        out: Tensor = self.head(self.norm(x))
        return out
