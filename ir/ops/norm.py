"""Norms and gates: operators over the last axis of a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.op import Op

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return _rms_norm(total, weight, eps), total


def _add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + y
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def _two_like(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _gate(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return ACTIVATIONS[act](gate) * up


rms_norm = Op(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",  # x [..., E], weight [E]
    reference=_rms_norm,
    shape=lambda x, weight, eps: x.new_empty(x.shape),
)

# x, y [B,T,E]; weight, bias [E] -> (norm(x + y), x + y)
add_rms_norm = Op(
    "add_rms_norm",
    "(Tensor x, Tensor y, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=_add_rms_norm,
    shape=_two_like,
)
add_layer_norm = Op(
    "add_layer_norm",
    "(Tensor x, Tensor y, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    reference=_add_layer_norm,
    shape=_two_like,
)

gate = Op(
    "gate",
    "(Tensor gate, Tensor up, str act) -> Tensor",  # act(gate) * up, elementwise
    reference=_gate,
    shape=lambda gate, up, act: gate.new_empty(gate.shape),
)
