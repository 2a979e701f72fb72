"""The bundled model in plain PyTorch, named as Llama checkpoints are, and its two optimisers.

Training differs from `transformers` in two things only: every sample may skip layers (LayerSkip's
layer dropout) and `states` yields the residual stream after each layer for the early-exit loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from causal import causal_attention
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 576
    positions: int = 2048
    theta: float = 10_000_000.0
    eps: float = 1e-6
    head_dim: int = 64
    causal: bool = True


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self.eps = shape.eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).type_as(x) * self.weight


def linear(inputs: int, outputs: int, zero: bool = False) -> nn.Linear:
    """Branches end in a zero matrix, so that an untrained layer is the identity."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.0 if zero else inputs**-0.5)
    return layer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the two halves of each head; x [B,H,T,D], cos and sin [T,D/2] or [B,1,T,D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden, zero=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sees: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            proj(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if sees is not None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
        elif self.shape.causal and x.device.type == "cpu":
            out = causal_attention(q, k, v)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.shape.causal, enable_gqa=True
            )
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return merged


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.ffn)
        self.up_proj = linear(shape.hidden, shape.ffn)
        self.down_proj = linear(shape.ffn, shape.hidden, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, keep: Tensor, cos: Tensor, sin: Tensor, sees: Tensor | None = None
    ) -> Tensor:
        """keep [B,1,1] is 0 for the samples that skip this layer, else 1."""
        x = torch.addcmul(x, keep, self.self_attn(self.input_layernorm(x), cos, sin, sees).to(x))
        return torch.addcmul(x, keep, self.mlp(self.post_attention_layernorm(x)).to(x))


class Llama(nn.Module):
    """Embeddings start large, so that a token stays visible beneath what the layers add to it (at
    the usual 0.02 copying does not form); the last norm starts small to keep the logits near 1.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        nn.init.constant_(self.norm.weight, 0.06)
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = torch.outer(torch.arange(shape.positions).double(), shape.theta**-powers)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def states(
        self,
        tokens: Tensor,
        drop: float = 0.0,
        places: Tensor | None = None,
        sees: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """The residual stream after each layer; `drop` is the last one's rate of being skipped. `places` [B,T]: the
        position of each token, where they do not follow one another; `sees` [B,1,T,T], bool: which others it sees,
        where the shape does not say.
        """
        x = self.embed_tokens(tokens)
        if places is None:
            cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        else:
            cos, sin = self.cos[places][:, None], self.sin[places][:, None]
        for at, layer in enumerate(self.layers):
            rate = drop * (2 ** (at / (self.shape.layers - 1)) - 1)
            keep = torch.rand(len(tokens), 1, 1) >= rate  # on the CPU, whose state is saved
            x = layer(x, keep.to(x), cos, sin, sees)
            yield x

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embed_tokens.weight)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: each [R,C] of the batch goes to about U V^T of its SVD, in a few products.

    The odd quintic pushes every singular value towards the band 0.7 to 1.2 rather than to 1,
    which is as good for an update and takes half the steps.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose matrix updates are orthogonalised; equal shapes go in one batch."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                shapes.setdefault(param.shape, []).append(param)
            for same in shapes.values():
                self._update(same, group)

    def _update(self, params: list[nn.Parameter], group: dict[str, float]) -> None:
        pushes = []
        for param in params:
            assert param.grad is not None
            trace = self.state[param].setdefault("trace", torch.zeros_like(param))
            trace.lerp_(param.grad, 1 - group["momentum"])
            pushes.append(param.grad.lerp(trace, group["momentum"]))
        rows, columns = params[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for param, push in zip(params, orthogonal(torch.stack(pushes)), strict=True):
            param.mul_(1 - group["lr"] * group["decay"]).sub_(push, alpha=scale)


def optimisers(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    groups = [
        {"params": [model.embed_tokens.weight], "lr": 2.5e-2},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 2e-3},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr=0.02), adam]
