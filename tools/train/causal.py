"""Causal attention for training on a processor: a few large products for each block of queries.

`scaled_dot_product_attention` takes 1.5 to 2.5 times as long there (rows of 512 to 2048 tokens, bfloat16), most of
it in its backward pass. The weights of the blocks are kept for it: half of T² numbers per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = (
    128  # queries; products stay large, and a quarter of a block's keys at most are masked in vain
)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, length, width = q.shape
        pairs = rows * k.shape[1]  # of a row and a KV head
        q = (q * width**-0.5).reshape(pairs, -1, length, width)
        k, v = k.reshape(pairs, length, width), v.reshape(pairs, length, width)
        out, kept = torch.empty_like(q), []
        for start in range(0, length, BLOCK):
            end = min(length, start + BLOCK)
            scores = torch.bmm(q[:, :, start:end].reshape(pairs, -1, width), k[:, :end].mT)
            later = torch.full((end - start, end - start), -torch.inf, dtype=q.dtype).triu(1)
            scores.view(pairs, -1, end - start, end)[..., start:] += later
            kept.append(scores.softmax(-1))
            mixed = torch.bmm(kept[-1], v[:, :end])
            out[:, :, start:end] = mixed.view(pairs, -1, end - start, width)
        ctx.save_for_backward(q, k, v, *kept)
        return out.view(rows, heads, length, width)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, *kept = ctx.saved_tensors
        pairs, _, length, width = q.shape
        rows, heads = slope.shape[:2]
        slope = slope.reshape(q.shape)
        by_q = torch.empty_like(q)
        by_k, by_v = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
        for weights, start in zip(kept, range(0, length, BLOCK), strict=True):
            end = min(length, start + BLOCK)
            there = slope[:, :, start:end].reshape(pairs, -1, width)
            by_v[:, :end] += torch.bmm(weights.mT, there)
            by_scores = torch._softmax_backward_data(
                torch.bmm(there, v[:, :end].mT), weights, -1, weights.dtype
            )
            by_q[:, :, start:end] = torch.bmm(by_scores, k[:, :end]).view(
                by_q[:, :, start:end].shape
            )
            by_k[:, :end] += torch.bmm(by_scores.mT, q[:, :, start:end].reshape(pairs, -1, width))
        kv = (rows, -1, length, width)
        return (
            (by_q * width**-0.5).view(rows, heads, length, width),
            by_k.to(k.dtype).view(kv),
            by_v.to(v.dtype).view(kv),
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B,H,T,D] from queries [B,H,T,D] and keys and values [B,G,T,D], H a multiple of G."""
    out: Tensor = _Causal.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out
