"""The rest of the dialect through PyTorch, where it has a kernel of its own or the reference waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.ops import experts, norm
from accel.ir.ties import TOPK, topk
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.table import lower

FEW = 16  # rows up to which each gathers the weights of its own expert


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return F.rms_norm(total, weight.shape, weight, eps), total


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
    return b.call(add_rms_norm, x, y, weight, eps) if same else NotImplemented


@lower(experts.expert_linear.default)
def expert_linear_rule(b: Builder, *operands: Any) -> Any:
    return b.call(expert_linear, *operands)


@lower(TOPK)
def topk_rule(b: Builder, *operands: Any) -> Any:
    """Of equal values the first, as on every target."""
    return b.call(topk, *operands)
