"""Mixtures of experts: a linear map per row, each with the weights of the expert that was chosen for it."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.ir.ops.op import Op


def _expert_linear(x: Tensor, ids: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2 if transposed else 1])
    for expert in ids.unique().tolist():
        rows = (ids == expert).nonzero().flatten()
        matrix = weight[expert] if transposed else weight[expert].t()
        out[rows] = x[rows] @ matrix
    return out


# x [N,E], ids [N] (below X), weight [X,F,E], or [X,E,F] where `transposed` -> [N,F]
expert_linear = Op(
    "expert_linear",
    "(Tensor x, Tensor ids, Tensor weight, bool transposed) -> Tensor",
    reference=_expert_linear,
    shape=lambda x, ids, weight, transposed: torch.empty(
        (x.shape[0], weight.shape[2 if transposed else 1]), dtype=x.dtype, device=x.device
    ),
)
