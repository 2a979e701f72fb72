"""A `Spec` as a module: tokens [B,T] -> logits, in whatever the spec says it returns them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from models import randomise
from torch import Tensor, nn

from decoders.attention import Attention, Module, hidden_by, visible_of
from decoders.parts import Mlp, Norm, Places
from decoders.spec import Spec


class Block(nn.Module):
    """Attention and MLP around the residual stream."""

    def __init__(self, spec: Spec, layer: int):
        super().__init__()
        self.spec = spec
        kind = Module if spec.attention == "module" else Attention
        self.attention, self.mlp = kind(spec, layer), Mlp(spec)
        count = {"sandwich": 4, "parallel": 1}.get(spec.place, 2)
        self.norms = nn.ModuleList(Norm(spec.norm, spec.hidden) for _ in range(count))
        if spec.residual == "vector":
            self.scales = nn.ParameterList(torch.full((spec.hidden,), 0.7) for _ in range(2))
        if spec.residual == "learned":
            self.scales = nn.ParameterList(torch.full((1,), 0.5) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,T,E] or [T,B,E]."""
        place, norms = self.spec.place, self.norms
        if place.startswith("parallel"):
            a = norms[0](x)
            return self.add(self.add(x, self.attention(a, positions), 0), self.mlp(
                a if place == "parallel" else norms[1](x)
            ), 1)  # fmt: skip
        for i, inner in enumerate((lambda y: self.attention(y, positions), self.mlp)):
            if place == "post":
                x = norms[i](self.add(x, inner(x), i))
            elif place == "sandwich":
                x = self.add(x, norms[2 + i](inner(norms[i](x))), i)
            else:
                x = self.add(x, inner(norms[i](x)), i)
        return x

    def add(self, x: Tensor, y: Tensor, which: int) -> Tensor:
        """x + y, scaled as the spec says."""
        if self.spec.residual == "constant":
            return x * 0.9 + y * 0.6
        return x + y if self.spec.residual == "plain" else x + self.scales[which] * y


class Ready(nn.Module):
    """nn.TransformerEncoderLayer, used causally."""

    def __init__(self, spec: Spec, layer: int):
        super().__init__()
        self.spec, self.sees = spec, visible_of(spec.mask, layer)
        self.inner = nn.TransformerEncoderLayer(
            spec.hidden, spec.heads, 28, dropout=0.1, activation="gelu", bias=spec.bias,
            batch_first=spec.layout == "batch", norm_first=spec.place == "pre",
        )  # fmt: skip

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,T,E] or [T,B,E]."""
        mask = hidden_by(self.sees, positions.shape[-1], self.spec.fill)
        out: Tensor = self.inner(x, src_mask=mask, is_causal=self.spec.mask == "causal")
        return out


class Decoder(nn.Module):
    """forward(tokens [B,T]) -> logits [B,T,V]."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.places = Places(spec)
        block = Ready if spec.attention == "layer" else Block
        self.blocks = nn.ModuleList(block(spec, i) for i in range(spec.layers))
        self.norm = Norm("layer" if spec.norm == "none" else spec.norm, spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=spec.bias and not spec.tied)
        if spec.tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("index", torch.arange(spec.longest), persistent=False)

    def forward(self, tokens: Tensor) -> Any:
        """Logits alone, or first in a tuple, or under their name."""
        return self.run(tokens, self.positions(tokens))

    def positions(self, tokens: Tensor) -> Tensor:
        """[T] or [B,T]."""
        if self.spec.source == "cumsum":
            return torch.ones_like(tokens).cumsum(1) - 1
        if self.spec.source == "buffer":
            return self.index[: tokens.shape[1]]
        return torch.arange(tokens.shape[1], device=tokens.device)

    def run(self, tokens: Tensor, positions: Tensor) -> Any:
        """The model at some positions [T] or [B,T]."""
        spec = self.spec
        x = self.tokens(tokens)
        if spec.embedding == "scaled":
            x = x * spec.hidden**0.5
        places = self.places(positions)
        if places is not None:
            x = x + places
        if spec.embedding == "normed":
            x = F.layer_norm(x, (spec.hidden,))
        if spec.layout == "time":
            x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, positions)
        if spec.layout == "time":
            x = x.transpose(0, 1)
        logits = self.head(self.norm(x) if spec.head != "plain" or spec.place == "pre" else x)
        if spec.head == "cap":
            logits = 3.0 * torch.tanh(logits / 3.0)
        if spec.head == "scaled":
            logits = logits / 4
        if spec.returns == "tuple":
            return logits, x
        if spec.returns == "dict":
            return {"hidden": x, "logits": logits}
        return SimpleNamespace(logits=logits) if spec.returns == "object" else logits


class Placed(Decoder):
    """forward(tokens [B,T], positions [B,T])."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:  # type: ignore[override]
        """At given positions, or at 0, 1, …"""
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
        return self.run(tokens, positions)


def build(spec: Spec) -> nn.Module:
    """The module of a spec, its random weights the same at every call."""
    module = Placed(spec) if spec.source == "given" else Decoder(spec)
    return randomise(module, f"decoder {spec.case}")
