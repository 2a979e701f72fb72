"""Attention written in every way that people write it, over the same masks and biases."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from decoders.parts import Bias, Norm, Rotary
from decoders.spec import Spec

LEAST = torch.finfo(torch.float32).min
Visible = Callable[[Tensor, Tensor], Tensor]


def visible_of(kind: str, layer: int) -> Visible:
    """What a query at position q sees of a key at position k; works on any shapes that broadcast."""
    if kind == "mixed":
        kind = ("causal", "window")[layer % 2]
    rules: dict[str, Visible] = {
        "causal": lambda q, k: k <= q,
        "window": lambda q, k: (k <= q) & (q - k < 5),
        "chunk": lambda q, k: (k <= q) & (q // 7 == k // 7),
        "strided": lambda q, k: (k <= q) & ((q - k < 3) | ((q - k) % 4 == 0)),
        "first_keys": lambda q, k: (k <= q) & ((k < 2) | (q - k < 6)),
    }
    return rules[kind]


def hide(scores: Tensor, seen: Tensor, fill: str) -> Tensor:
    """Scores [..,T,T] with what is not seen hidden, in one of the ways people write it."""
    if fill in ("inf", "table", "given"):
        return scores.masked_fill(~seen, float("-inf"))
    if fill == "least":
        return scores.masked_fill(seen == 0, LEAST)
    if fill == "finite":
        return scores.masked_fill(seen.logical_not(), -1e9)
    if fill == "where":
        return torch.where(seen, scores, torch.full_like(scores, -1e9))
    if fill == "product":
        keep = seen.float()
        return scores * keep - 1e10 * (1 - keep)
    return scores + added(seen, fill)


def added(seen: Tensor, fill: str) -> Tensor:
    """A float mask to add."""
    if fill == "add_finite":
        return (1.0 - seen.float()) * -10000.0
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


class Attention(nn.Module):
    """x [B,T,E] (or [T,B,E] inside a time-first model) -> the same shape."""

    def __init__(self, spec: Spec, layer: int):
        super().__init__()
        self.spec = spec
        self.sees = visible_of(spec.mask, layer)
        h, g, d = spec.heads, spec.heads // spec.repeat, spec.head_dim
        dv = spec.value_dim or d
        self.sizes = (h * d, g * d, g * dv)
        widths = list(self.sizes) if spec.qkv == "separate" else [sum(self.sizes)]
        self.project = nn.ModuleList(nn.Linear(spec.hidden, w, bias=spec.bias) for w in widths)
        self.out = nn.Linear(h * dv, spec.hidden, bias=spec.bias)
        if spec.gated:
            self.gate = nn.Linear(spec.hidden, h * dv, bias=spec.bias)
        if spec.qk_norm != "none":
            self.q_norm, self.k_norm = Norm(spec.qk_norm, d), Norm(spec.qk_norm, d)
        self.rotary = Rotary(spec) if spec.positions.startswith("rope") else None
        self.distance = Bias(spec)
        if spec.sinks == "column":
            self.sink = nn.Parameter(torch.zeros(h))
        self.register_buffer("scale", torch.tensor(d**-0.5), persistent=False)
        index = torch.arange(spec.longest)
        table = self.sees(index[:, None], index[None])
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """positions [T] or [B,T]."""
        spec = self.spec
        q, k, v = self.heads(x)
        if spec.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        t = q.shape[2]
        index = torch.arange(t, device=x.device)
        bias = self.distance(index[:, None], index[None])
        if spec.attention.startswith("flex"):
            out = self.flex(q, k, v, bias)
        else:
            seen = self.seen(positions, index)
            out = self.attend(q, k, v, seen, bias)
        out = out.permute(2, 0, 1, 3) if spec.layout == "time" else out.transpose(1, 2)
        out = out.reshape(*out.shape[:2], -1)
        if spec.gated:
            out = out * torch.sigmoid(self.gate(x))
        result: Tensor = self.out(out)
        return result

    def seen(self, positions: Tensor, index: Tensor) -> Tensor:
        """bool [T,T], or [B,1,T,T] where it is made from given positions."""
        if self.spec.fill == "table":
            return self.table[: index.shape[0], : index.shape[0]]
        if self.spec.fill == "given" and positions.dim() == 2:
            return self.sees(positions[:, None, :, None], positions[:, None, None, :])
        return self.sees(index[:, None], index[None])

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,H,T,D], k [B,G,T,D], v [B,G,T,Dv], from one projection or three."""
        spec = self.spec
        parts: list[Tensor] = [p(x) for p in self.project]
        g, d = spec.heads // spec.repeat, spec.head_dim
        if spec.qkv == "chunk":
            parts = list(parts[0].chunk(3, -1))
        elif spec.qkv == "split":
            parts = list(parts[0].split(self.sizes, -1))
        elif spec.qkv == "unbind":
            parts = list(parts[0].view(*x.shape[:2], 3, g * d).unbind(2))
        elif spec.qkv == "per_head":
            parts = list(parts[0].view(*x.shape[:2], g, 3 * d).chunk(3, -1))
        order = (1, 2, 0, 3) if spec.layout == "time" else (0, 2, 1, 3)
        counts = (spec.heads, g, g)
        q, k, v = (
            part.reshape(*x.shape[:2], n, -1).permute(order)
            for part, n in zip(parts, counts, strict=True)
        )
        return q, k, v

    def flex(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """By flex_attention: the mask as a block mask, or inside score_mod."""
        spec, t = self.spec, q.shape[2]
        block = None
        if spec.attention == "flex":
            block = create_block_mask(
                lambda b, h, i, j: self.sees(i, j), None, None, t, t, device=str(q.device)
            )

        def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if spec.softcap:
                score = spec.softcap * torch.tanh(score / spec.softcap)
            if bias is not None:
                score = score + bias[h, i, j]
            return (
                score if block is not None else torch.where(self.sees(i, j), score, -float("inf"))
            )

        q, scale = self.scaled(q)
        mod = change if block is None or spec.softcap or bias is not None else None
        out: Tensor = flex_attention(
            q, k, v, score_mod=mod, block_mask=block, scale=scale, enable_gqa=spec.repeat > 1
        )
        return out

    def scaled(self, q: Tensor) -> tuple[Tensor, float | None]:
        """(q, the scale left for the scores): None is 1/√D."""
        kind = self.spec.scale
        if kind == "queries":
            return q * self.spec.head_dim**-0.5, 1.0
        return q, 0.3 if kind == "constant" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None) -> Tensor:
        """[B,H,T,Dv]."""
        spec = self.spec
        q, scale = self.scaled(q)
        if spec.attention.startswith("sdpa"):
            return self.fused(q, k, v, seen, bias, scale)
        if spec.scale == "stored":
            q, scale = q * self.scale, 1.0
        self.factor = q.shape[-1] ** -0.5 if scale is None else scale
        sink = self.sink[:, None, None] if spec.sinks == "column" else None
        if spec.attention.endswith("grouped"):
            grouped = q.unflatten(1, (-1, spec.repeat))  # [B,G,R,T,D]
            seen = seen[:, None] if seen.dim() == 4 else seen
            bias, sink = (
                None if x is None else x.unflatten(0, (-1, spec.repeat)) for x in (bias, sink)
            )
            if spec.attention == "einsum_grouped":
                p = self.weights(torch.einsum("bgrtd,bgsd->bgrts", grouped, k), seen, bias, sink)
                return torch.einsum("bgrts,bgsd->bgrtd", p, v).flatten(1, 2)
            p = self.weights(grouped @ k.unsqueeze(2).transpose(-1, -2), seen, bias, sink)
            return (p @ v.unsqueeze(2)).flatten(1, 2)
        k, v = (x.repeat_interleave(spec.repeat, 1) if spec.repeat > 1 else x for x in (k, v))
        if spec.attention == "one_by_one":
            return torch.stack([
                self.weights(
                    q[:, i] @ k[:, i].transpose(1, 2), seen[:, 0] if seen.dim() == 4 else seen,
                    None if bias is None else bias[i], None if sink is None else sink[i],
                ) @ v[:, i] for i in range(spec.heads)
            ], 1)  # fmt: skip
        return self.product(q, k, v, lambda scores: self.weights(scores, seen, bias, sink))

    def weights(
        self, scores: Tensor, seen: Tensor, bias: Tensor | None, sink: Tensor | None
    ) -> Tensor:
        """Scores [..,T,T] -> probabilities; a sink takes its share of each row and gives nothing."""
        spec = self.spec
        scores = scores * self.factor
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if bias is not None:
            scores = scores + bias
        scores = hide(scores, seen, spec.fill)
        if sink is not None:
            return torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
        if spec.sinks == "plus_one":
            return torch.cat([torch.zeros_like(scores[..., :1]), scores], -1).softmax(-1)[..., 1:]
        return scores.softmax(-1)

    def product(
        self, q: Tensor, k: Tensor, v: Tensor, weights: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """weights(q kᵀ) v over as many KV heads as query heads."""
        form, (b, h, t, _) = self.spec.attention, q.shape
        if form == "einsum":
            return torch.einsum(
                "bhqk,bhkd->bhqd", weights(torch.einsum("bhqd,bhkd->bhqk", q, k)), v
            )
        if form == "einsum_late":  # heads after tokens, as in [B,T,H,D] code
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            p = weights(torch.einsum("blhe,bshe->bhls", q, k))
            return torch.einsum("bhls,bshd->blhd", p, v).transpose(1, 2)
        if form in ("bmm", "baddbmm"):
            q, k, v = (x.reshape(b * h, t, -1) for x in (q, k, v))
            if form == "bmm":
                scores = torch.bmm(q, k.transpose(1, 2))
            else:
                empty = torch.zeros(1, 1, 1, dtype=q.dtype)
                scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=1.0)
            p = weights(scores.view(b, h, t, t)).view(b * h, t, t)
            return torch.bmm(p, v).view(b, h, t, -1)
        return weights(q @ k.transpose(-1, -2)) @ v

    def fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor,
        bias: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """By scaled_dot_product_attention."""
        spec = self.spec
        grouped = spec.attention == "sdpa_grouped" and spec.repeat > 1
        if not grouped:
            k, v = (x.repeat_interleave(spec.repeat, 1) if spec.repeat > 1 else x for x in (k, v))
        plain = bias is None and spec.mask == "causal" and spec.fill == "inf"
        mask: Tensor | None = seen
        if plain:
            mask = None
        elif bias is not None:
            mask = bias + added(seen, spec.fill)
        elif spec.fill.startswith("add"):
            mask = added(seen, spec.fill)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=plain, scale=scale, enable_gqa=grouped
        )


class Module(nn.Module):
    """nn.MultiheadAttention over one sequence: x [B,T,E] or [T,B,E]."""

    def __init__(self, spec: Spec, layer: int):
        super().__init__()
        self.spec, self.sees = spec, visible_of(spec.mask, layer)
        self.inner = nn.MultiheadAttention(
            spec.hidden, spec.heads, bias=spec.bias, batch_first=spec.layout == "batch"
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """positions are not read: they were added to the embeddings."""
        hidden = hidden_by(self.sees, positions.shape[-1], self.spec.fill)
        simple = self.spec.mask == "causal" and self.spec.fill == "table"
        out: Tensor = self.inner(x, x, x, attn_mask=hidden, need_weights=False, is_causal=simple)[0]
        return out


def hidden_by(sees: Visible, length: int, fill: str) -> Tensor:
    """The mask as torch.nn's modules take it: True (or a float to add) where nothing is seen."""
    index = torch.arange(length)
    seen = sees(index[:, None], index[None])
    return added(seen, "add_inf") if fill.startswith("add") else ~seen
