"""RMSNorm, in the forms that models write it, becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.ops.norm import rms_norm
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.clean.clean import Clean
from accel.passes.recognise.rewrite import Rewrite, Rule, Setting, Site, Value, call

aten = torch.ops.aten
X, WEIGHT = Value("x"), Value("weight")
SQUARE = (
    call(aten.pow.Tensor_Scalar, X, 2) | call(aten.square.default, X) | call(aten.mul.Tensor, X, X)
)
MEAN = call(aten.mean.dim, SQUARE, Setting("axes"), True)
SUM = call((aten.add.Tensor, aten.add.Scalar), MEAN, Setting("eps", (float,)))
ROOT = call(aten.sqrt.default, SUM)
INVERSE = (
    call(aten.rsqrt.default, SUM)
    | call(aten.pow.Tensor_Scalar, SUM, -0.5)
    | call(aten.reciprocal.default, ROOT)
)
SCALED = call(aten.mul.Tensor, X, INVERSE) | call(aten.div.Tensor, X, ROOT)


def _norm(
    at: Site, x: fx.Node, axes: Any, eps: float, weight: fx.Node | None = None
) -> fx.Node | str | None:
    if axes not in ([-1], [x.meta["val"].dim() - 1]):
        return "no mean over the last axis"
    if weight is None:
        width = int(x.meta["val"].shape[-1])
        weight = at.editor.param(f"ones.{width}", torch.ones(width))
    elif at.kinds[weight] != "const" or weight.meta["val"].dim() != 1:
        return None
    return at.call(rms_norm.default, x, weight, eps)


def _torch_norm(at: Site, x: fx.Node, weight: fx.Node, eps: float | None = None) -> fx.Node:
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    return at.call(rms_norm.default, x, weight, eps)


@dataclass(frozen=True)
class Norms(Rewrite):
    """x * rsqrt(mean(x²) + eps) * w  ->  rms_norm(x, w, eps). LayerNorm is one operator already.

    Before and after: `tests/passes/texts/norms.before.txt`, `norms.after.txt`.
    """

    after = (Clean,)
    rules = (
        Rule(call(aten.mul.Tensor, SCALED, WEIGHT) | SCALED, _norm),
        Rule(
            call(aten.rms_norm.default, X, Setting(), WEIGHT, Setting("eps"))
            | call(aten.rms_norm.default, X, Setting(), WEIGHT),
            _torch_norm,
        ),
    )

    def run(self, program: Program) -> Report:
        report = super().run(program)
        for node in program.nodes(aten.mean.dim):
            report.refused.append(f"{node.name}: is not in x * rsqrt(mean(x²) + eps) * w")
        return report
