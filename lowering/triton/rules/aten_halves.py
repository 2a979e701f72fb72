"""Products with weights in bfloat16 and float16: inputs rounded to the weight's type once for all that read them,
tensor cores, float32 sums and results.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from accel.lowering.triton.kernels.in_halves import in_halves
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.halves import LOOKUP
from accel.lowering.triton.writer.sizes import power, rows
from accel.lowering.triton.writer.table import lower

aten = torch.ops.aten
_STRETCH = 1024  # numbers of a row that a program reads at once


def in_half(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """x [..,K] as rows [M,K] of a dtype, and the powers of two [M,1] that float16 ones are to be multiplied by."""
    flat = rows(x.reshape(-1, x.shape[-1]))
    if dtype is not torch.float16:
        return flat.to(dtype), None
    out, scales = flat.new_empty(flat.shape, dtype=dtype), flat.new_empty(len(flat), 1)
    if flat.numel():
        block = min(_STRETCH, power(flat.shape[1]))
        in_halves[(len(flat),)](flat, out, scales, flat.shape[1], flat.stride(0), BLOCK=block)
    return out, scales


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..,M,K] times weight [..,K,N] (without that axis too), both in half precision, in float32."""
    multiply: Any = torch.bmm if x.dim() == 3 else torch.mm
    if x.device.type == "cuda":
        found: Tensor = multiply(x, weight, out_dtype=torch.float32)
    else:  # the same sums, which PyTorch has on GPUs alone
        found = multiply(x.float(), weight.float())
    return found


def linear(
    x: Tensor, narrow: Tensor, scales: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """`linear` of x, of which `in_half` gave the rest."""
    out = product(narrow, weight.t())
    if scales is not None:
        out *= scales
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of a matrix, in float32."""
    return weight[ids].float()


def halved(b: Builder, x: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    """`in_half` of x as a weight's type wants it, once for all that read it."""
    found = b.once(in_half, x, b.value(weight).dtype)
    return b.once(operator.getitem, found, 0), b.once(operator.getitem, found, 1)


@lower(aten.linear.default)
def linear_rule(b: Builder, x: fx.Node, weight: fx.Node, bias: Any = None) -> Any:
    if weight not in b.halves:
        return NotImplemented
    return b.call(linear, x, *halved(b, x, weight), weight, bias)


@lower(LOOKUP)
def embedding_rule(b: Builder, weight: fx.Node, ids: fx.Node, *_: Any) -> Any:
    return b.call(look_up, weight, ids) if weight in b.halves else NotImplemented
