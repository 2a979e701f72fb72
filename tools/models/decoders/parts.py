"""Norms, MLPs, positions: the parts of a random decoder that are not its attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoders.spec import Spec


class Norm(nn.Module):
    """One of the ways to normalise [.., width]."""

    def __init__(self, kind: str, width: int):
        super().__init__()
        self.kind = kind
        if kind.startswith("layer"):
            self.inner: nn.Module = nn.LayerNorm(width, bias=kind == "layer")
        elif kind == "rms":
            self.inner = nn.RMSNorm(width, eps=1e-5)
        elif kind in ("rms_own", "rms_plus_one"):
            self.weight = nn.Parameter(torch.full((width,), float(kind == "rms_own")))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("layer", "layer_plain", "rms"):
            out: Tensor = self.inner(x)
            return out
        if self.kind == "none":
            return x
        if self.kind == "unit":
            return F.normalize(x, dim=-1) * 3.0
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.kind == "rms_flat":
            return x
        return x * (self.weight if self.kind == "rms_own" else 1 + self.weight)


class Mlp(nn.Module):
    """One of the ways to compute per token: [.., hidden] -> [.., hidden]."""

    EXPERTS = 4

    def __init__(self, spec: Spec):
        super().__init__()
        self.kind, width = spec.mlp, 28
        wide = 2 if spec.mlp in ("swiglu", "geglu", "fused") else 1
        if spec.mlp.startswith("moe"):
            self.router = nn.Linear(spec.hidden, self.EXPERTS, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(spec.hidden, 16),
                    nn.SiLU(),
                    nn.Linear(16, spec.hidden, bias=spec.bias),
                )
                for _ in range(self.EXPERTS)
            )
        elif spec.mlp == "fused":
            self.up = nn.Linear(spec.hidden, 2 * width, bias=spec.bias)
        else:
            self.up = nn.Linear(spec.hidden, width, bias=spec.bias)
            if wide == 2:
                self.gate = nn.Linear(spec.hidden, width, bias=spec.bias)
        if not spec.mlp.startswith("moe"):
            self.down = nn.Linear(width, spec.hidden, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("moe"):
            return self.mixture(x)
        up = self.up(x)
        if self.kind == "fused":
            a, b = up.chunk(2, -1)
            out: Tensor = self.down(F.silu(a) * b)
        elif self.kind == "swiglu":
            out = self.down(F.silu(self.gate(x)) * up)
        elif self.kind == "geglu":
            out = self.down(up * F.gelu(self.gate(x), approximate="tanh"))
        else:
            out = self.down(ACTIVATIONS[self.kind](up))
        return out

    def mixture(self, x: Tensor) -> Tensor:
        """All experts weighted, the best two of them, or a loop that masks what an expert is not for."""
        chances = self.router(x).softmax(-1)
        if self.kind == "moe_all":
            every = torch.stack([e(x) for e in self.experts], -1)  # [B,T,E,4]
            return (every @ chances[..., None])[..., 0]
        best, index = chances.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        if self.kind == "moe_topk":
            weights = torch.zeros_like(chances).scatter(-1, index, best)
            every = torch.stack([e(x) for e in self.experts], -2)
            return (every * weights[..., None]).sum(-2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight = torch.where(index == i, best, 0.0).sum(-1, keepdim=True)
            out = out + expert(x) * weight
        return out


ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "none": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_own": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu_squared": lambda x: F.relu(x).square(),
}


class Rotary(nn.Module):
    """One of the ways to turn pairs of channels by position; x [B,H,T,D], positions [T] or [B,T]."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.kind = spec.positions
        self.width = spec.head_dim // 2 // 2 * 2 if self.kind == "rope_part" else spec.head_dim
        speeds = 50.0 ** -(torch.arange(0, self.width, 2) / self.width)
        self.register_buffer("speeds", speeds, persistent=False)
        angles = torch.outer(torch.arange(spec.longest).float(), speeds)
        if self.kind == "rope_table":
            twice = torch.cat([angles, angles], -1)
            self.register_buffer("cos", twice.cos(), persistent=False)
            self.register_buffer("sin", twice.sin(), persistent=False)
        if self.kind == "rope_complex":
            turns = torch.polar(torch.ones_like(angles), angles)
            self.register_buffer("turns", turns, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same shape, turned."""
        if self.kind == "rope_complex":
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            turns = self.turns[positions]
            turns = turns if turns.dim() == 2 else turns[:, None]
            return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)
        if self.kind == "rope_table":
            cos, sin = self.cos[positions], self.sin[positions]
        else:
            angles = positions[..., None].float() * self.speeds  # [.., T, R/2]
            angles = (
                angles.repeat_interleave(2, -1)
                if self.kind in ("rope_pairs", "rope_stack")
                else torch.cat([angles, angles], -1)
            )
            cos, sin = angles.cos(), angles.sin()
        if cos.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        turned, kept = x[..., : self.width], x[..., self.width :]
        turned = turned * cos + self.quarter(turned) * sin
        return torch.cat([turned, kept], -1) if kept.shape[-1] else turned

    def quarter(self, x: Tensor) -> Tensor:
        """Every pair (a, b) -> (-b, a)."""
        if self.kind == "rope_stack":
            pairs = x.unflatten(-1, (-1, 2))
            return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
        if self.kind == "rope_pairs":
            out = torch.empty_like(x)
            out[..., 0::2], out[..., 1::2] = -x[..., 1::2], x[..., 0::2]
            return out
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)


class Places(nn.Module):
    """What is added to the embeddings: learned, sinusoidal or nothing; -> [.., T, hidden] or None."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.kind, self.hidden = spec.positions, spec.hidden
        if self.kind == "learned":
            self.table = nn.Embedding(spec.longest, spec.hidden)
        if self.kind == "sinusoid_table":
            table = self.waves(torch.arange(spec.longest))
            self.register_buffer("waves_table", table[None], persistent=False)

    def waves(self, positions: Tensor) -> Tensor:
        """Sines and cosines [.., T, hidden]."""
        speeds = torch.exp(torch.arange(0, self.hidden, 2) * (-math.log(90.0) / self.hidden))
        angles = positions[..., None] * speeds
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, positions: Tensor) -> Tensor | None:
        """positions [T] or [B,T]."""
        if self.kind == "learned":
            out: Tensor = self.table(positions)
            return out
        if self.kind == "sinusoid":
            return self.waves(positions)
        if self.kind == "sinusoid_table":
            return self.waves_table[:, : positions.shape[-1]]
        return None


class Bias(nn.Module):
    """What is added to the scores, [H,T,T] or None: ALiBi, buckets of distance as in T5, clipped distances."""

    FAR = 9

    def __init__(self, spec: Spec):
        super().__init__()
        self.kind = spec.positions
        slopes = torch.tensor([2.0 ** -(i % 4 + 1) for i in range(spec.heads)])
        self.register_buffer("slopes", slopes, persistent=False)
        if self.kind in ("t5", "clipped"):
            self.table = nn.Embedding(self.FAR + 3, spec.heads)

    def forward(self, q: Tensor, k: Tensor) -> Tensor | None:
        """q, k: positions that broadcast, here [T,1] and [1,T]."""
        if self.kind == "alibi":
            return -self.slopes[:, None, None] * (q - k).clamp(min=0)
        if self.kind == "alibi_keys":
            return self.slopes[:, None, None] * (k + 0 * q)
        if self.kind not in ("t5", "clipped"):
            return None
        distance = (q - k).clamp(min=0)
        if self.kind == "t5":
            far = 4 + (torch.log2(distance.float().clamp(min=1) / 4) * 2).long()
            distance = torch.where(distance < 4, distance, far.clamp(4, self.FAR + 2))
        out: Tensor = self.table(distance.clamp(max=self.FAR + 2))
        return out.permute(2, 0, 1)
