"""RWKV-X (arXiv:2504.21463): layers of RWKV-7 (arXiv:2503.14456), and after some of them one of attention without
positions, whose long texts are read by chunks (`kv.select = rwkv-x`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.ir.capture.arch.yoco import heads

_DECAY = (
    0.606531  # exp(-1/2): at most so much is subtracted from a channel's logarithm at each token
)
_EPSILON = 64e-5  # of the norm of each head


@dataclass(frozen=True)
class RwkvXConfig:
    """Sizes of a model. `num_sparse_layers` groups of layers, each of as many of RWKV-7, then one of attention.
    low_rank: inner width of what is added to decays, rates and gates.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_rwkv_layers: int
    num_sparse_layers: int
    head_dim: int
    low_rank: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.head_dim or self.num_sparse_layers < 1:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of head_dim {self.head_dim}, and "
                f"num_sparse_layers {self.num_sparse_layers} 1 or more"
            )
        if self.num_rwkv_layers % self.num_sparse_layers or not self.num_rwkv_layers:
            raise ValueError(
                f"num_rwkv_layers {self.num_rwkv_layers} must be a multiple of num_sparse_layers "
                f"{self.num_sparse_layers}"
            )


class Shift(nn.Module):
    """x [B,T,E] -> x of the token before, zeros before the first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1))


class DplrState(nn.Module):
    """S of each head, a matrix from zeros on: S = S (diag(w) + a bᵀ) + v kᵀ, y = S r."""

    def forward(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """All [B,T,H,D], w a logarithm -> [B,T,H,D]."""
        state = torch.zeros(*v.shape[:1], *v.shape[2:], k.shape[3])
        values = []
        for t in range(r.shape[1]):
            found = state @ a[:, t, :, :, None]
            state = state * w[:, t, :, None].exp() + found * b[:, t, :, None]
            state = state + v[:, t, :, :, None] * k[:, t, :, None]
            values.append((state @ r[:, t, :, :, None]).squeeze(-1))
        return torch.stack(values, 1)


class LowRank(nn.Module):
    """[B,T,E] -> [B,T,E] by few numbers, which pass through `act`; `bias`: what is added to all tokens alike."""

    def __init__(self, width: int, inner: int, bias: bool):
        super().__init__()
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=bias)


class TimeMix(nn.Module):
    """RWKV-7. `first`: whether it is the first layer's, whose values later layers mix into theirs."""

    def __init__(self, config: RwkvXConfig, first: bool):
        super().__init__()
        width, inner = config.hidden_size, config.low_rank
        self.heads, self.first, self.shift, self.state = (
            width // config.head_dim,
            first,
            Shift(),
            DplrState(),
        )
        self.mix = nn.Parameter(torch.rand(6, width))  # of r, w, k, v, a, g
        self.k_k, self.k_a = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.r_k = nn.Parameter(torch.randn(self.heads, config.head_dim) * 0.1)
        self.r, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.decay, self.rate = LowRank(width, inner, True), LowRank(width, inner, True)
        self.gate = LowRank(width, inner, False)
        self.residual = nn.ModuleList(LowRank(width, inner, True) for _ in range(not first))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B,T,E], values [B,T,E] of the first layer -> what is added to x, the first layer's values."""
        before = self.shift(x) - x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + before * share for share in self.mix)
        r, k, v = self.r(x_r), self.k(x_k), self.v(x_v)
        w = -_DECAY * torch.sigmoid(self.decay.up(torch.tanh(self.decay.down(x_w))))
        a = torch.sigmoid(self.rate.up(self.rate.down(x_a)))
        g = self.gate.up(torch.sigmoid(self.gate.down(x_g)))
        if values is None:
            values = v
        for one in cast("Iterable[LowRank]", self.residual):
            v = v + (values - v) * torch.sigmoid(one.up(one.down(x_v)))
        erase = F.normalize((k * self.k_k).unflatten(-1, (self.heads, -1)), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, w, k, v, a = (part.unflatten(-1, (self.heads, -1)) for part in (r, w, k, v, a))
        y = self.state(r, w, k, v, -erase, erase * a)
        y = F.layer_norm(y, y.shape[3:], eps=_EPSILON).flatten(2) * self.weight + self.bias
        here = ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(2)
        return self.out((y + here) * g), values


class ChannelMix(nn.Module):
    """The MLP of a layer."""

    def __init__(self, config: RwkvXConfig):
        super().__init__()
        self.shift, self.mix = Shift(), nn.Parameter(torch.rand(config.hidden_size))
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,T,E] -> what is added to it."""
        x = x + (self.shift(x) - x) * self.mix
        out: Tensor = self.down(torch.relu(self.up(x)).square())
        return out


class SparseMix(nn.Module):
    """Attention of as many KV heads as query heads, without positions."""

    def __init__(self, config: RwkvXConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = width // config.head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,T,E] -> what is added to it; the first layer's values, of which it has no need."""
        q, k, v = (heads(project(x), self.heads) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)), values


class RwkvXLayer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, config: RwkvXConfig, mixer: TimeMix | SparseMix):
        super().__init__()
        self.before, self.between = (nn.LayerNorm(config.hidden_size) for _ in range(2))
        self.mixer, self.channels = mixer, ChannelMix(config)

    def forward(self, x: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B,T,E] and the first layer's values [B,T,E] -> both."""
        added, values = self.mixer(self.before(x), values)
        x = x + added
        return x + self.channels(self.between(x)), values


class RwkvX(nn.Module):
    """tokens [B,T] -> logits [B,T,V]."""

    def __init__(self, config: RwkvXConfig):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.start, self.norm = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)
        each = c.num_rwkv_layers // c.num_sparse_layers
        mixers: list[TimeMix | SparseMix] = []
        for _ in range(c.num_sparse_layers):
            mixers += [TimeMix(c, first=not mixers and not index) for index in range(each)]
            mixers.append(SparseMix(c))
        self.layers = nn.ModuleList(RwkvXLayer(c, mixer) for mixer in mixers)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, values = self.start(self.embed(tokens)), None
        for layer in self.layers:
            x, values = layer(x, values)
        out: Tensor = self.head(self.norm(x))
        return out
