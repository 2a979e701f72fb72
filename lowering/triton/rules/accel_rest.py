"""The rest of the dialect through PyTorch, where it has a kernel of its own or the reference waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.ops import experts, norm
from accel.ir.ties import TOPK, topk
from accel.lowering.triton.kernels.add_norm import add_norm
from accel.lowering.triton.kernels.gated import gated
from accel.lowering.triton.kernels.leading import leading
from accel.lowering.triton.rules.aten_halves import halved, product
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.sizes import power, rows
from accel.lowering.triton.writer.table import lower

FEW = 16  # rows up to which each gathers the weights of its own expert
_WIDEST = 1 << 14  # channels of a row that one program holds, at most
_GATED = 1024  # channels of one program
_STRETCH = 2048  # numbers of which a program takes the largest
_MOST = 64  # of them; more are sorted


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both in one launch."""
    width = x.shape[-1]
    flat, other = (rows(t.reshape(-1, width)) for t in (x, y.expand_as(x)))
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    if flat.numel():
        add_norm[(len(flat),)](
            flat, other, weight.contiguous(), out, total, width, eps, flat.stride(0), other.stride(0),
            BLOCK=power(width), num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
    return out, total


def gate(x: Tensor, up: Tensor, act: str) -> Tensor:
    """`gate` in one launch."""
    width = x.shape[-1]
    flat, other = (rows(t.reshape(-1, width)) for t in (x, up))
    out = x.new_empty(x.shape)
    if flat.numel():
        block = min(_GATED, power(width))
        gated[(len(flat), -(-width // block))](
            flat, other, out, width, flat.stride(0), other.stride(0), ACT=act, BLOCK=block
        )
    return out


def few_largest(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """`topk`: a few numbers of the last axis without sorting it."""
    width = x.shape[-1]
    if dim not in (-1, x.dim() - 1) or not 0 < k <= min(_MOST, width) or x.dtype != torch.float32:
        return topk(x, k, dim, largest, sorted)
    flat = rows(x.reshape(-1, width))
    found, names, first = flat, flat, True
    while len(flat) and (first or width > k):
        block = min(_STRETCH, max(power(width), 2))
        count = -(-width // block)
        keys, places = (flat.new_empty((len(flat), count * k), dtype=torch.int32) for _ in "kp")
        leading[(len(flat), count)](
            found, names, keys, places, width, count, found.stride(0),
            K=k, FIRST=first, LARGEST=largest, BLOCK=block,
        )  # fmt: skip
        found, names, width, first = keys, places, count * k, False
    places = (
        names.long().view(*x.shape[:-1], k) if len(flat) else x.new_empty(*x.shape[:-1], k).long()
    )
    return x.gather(-1, places), places


def expert_linear(x: Tensor, ids: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Few rows gather their experts' weights, which asks the host nothing; many go expert by expert."""
    if x.shape[0] > FEW:
        found: Tensor = experts.expert_linear.reference(x, ids, weight, transposed)
        return found
    chosen = weight[ids]  # [N,F,E], or [N,E,F]
    return torch.einsum("ne,nef->nf" if transposed else "ne,nfe->nf", x, chosen)


@lower(norm.rms_norm.default)
def rms_norm_rule(b: Builder, x: fx.Node, weight: fx.Node, eps: float) -> Any:
    """Where the weight is of another dtype, the reference says which one the result has."""
    same = b.value(x).dtype == b.value(weight).dtype
    return (
        b.call(rms_norm, x, weight, eps) if same and b.value(weight).dim() == 1 else NotImplemented
    )


@lower(norm.add_rms_norm.default)
def add_rms_norm_rule(b: Builder, x: fx.Node, y: fx.Node, weight: fx.Node, eps: float) -> Any:
    same = b.value(x).dtype == b.value(y).dtype == b.value(weight).dtype
    fits = b.shape(x) == b.shape(y) and b.shape(weight)[0] <= _WIDEST
    return b.call(add_rms_norm, x, y, weight, eps) if same and fits else NotImplemented


@lower(norm.gate.default)
def gate_rule(b: Builder, x: fx.Node, up: fx.Node, act: str) -> Any:
    same = b.value(x).dtype == b.value(up).dtype and b.shape(x) == b.shape(up)
    return b.call(gate, x, up, act) if same else NotImplemented


def expert_linear_in_half(
    x: Tensor,
    narrow: Tensor,
    scales: Tensor | None,
    ids: Tensor,
    weight: Tensor,
    transposed: bool,
) -> Tensor:
    """The same with weights in half precision, of x, of which `in_half` gave the rest."""
    matrices = weight if transposed else weight.mT
    if len(narrow) <= FEW:
        out = product(narrow[:, None], matrices[ids]).squeeze(1)
    else:
        out = x.new_zeros(len(narrow), matrices.shape[2])
        for expert in ids.unique().tolist():
            own = (ids == expert).nonzero().flatten()
            out[own] = product(narrow[own], matrices[expert])
    return out if scales is None else out * scales


@lower(experts.expert_linear.default)
def expert_linear_rule(b: Builder, x: fx.Node, ids: fx.Node, weight: fx.Node, turned: bool) -> Any:
    if weight not in b.halves:
        return b.call(expert_linear, x, ids, weight, turned)
    return b.call(expert_linear_in_half, x, *halved(b, x, weight), ids, weight, turned)


@lower(TOPK)
def topk_rule(b: Builder, *operands: Any) -> Any:
    """Of equal values the first, as on every target."""
    return b.call(few_largest, *operands)
