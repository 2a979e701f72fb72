"""What rounding each weight costs: an estimate of the KL divergence of the predictions, of all weights from one run
forward and one back.

To second order the divergence is half the variance of the first-order change of log p(token), over tokens that the
model itself would write (the Fisher information, as in FIT, arXiv:2210.08502). So a token is drawn from every
prediction, and what rounding adds to a product is multiplied with the gradient there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.ops.op import operand_of
from accel.ir.program import Program, operand
from accel.passes.calibrate import feeds
from accel.passes.gradients import References

Read = Callable[[], Tensor]  # a weight [N,K]
Note = Callable[[Tensor, Tensor, Tensor], None]  # (weight [N,K], inputs [n,K], gradient [n,N])


def rounding_losses(
    program: Program,
    tokens: Tensor,
    products: Mapping[fx.Node, str],
    rounding: Callable[[Tensor], Tensor],
    parts: Mapping[str, list[int]],
) -> dict[str, list[float]]:
    """For the weight of each product, the mean KL per token of rounding each of its parts.

    tokens [n,T]; products: nodes of the step, with the name of their weight; rounding: [N,K] -> [N,K]; parts: how
    many rows each part of a weight has. A product that no token reaches costs nothing.
    """
    losses = {name: [0.0] * len(rows) for name, rows in parts.items()}

    def note(name: str) -> Note:
        def add(weight: Tensor, inputs: Tensor, gradient: Tensor) -> None:
            off = F.linear(inputs, rounding(weight) - weight) * gradient
            for i, part in enumerate(off.split(parts[name], dim=-1)):
                losses[name][i] += float(part.sum(-1).square().sum()) / (2 * tokens.numel())

        return add

    run = _Run(program, products, note)
    with torch.enable_grad():
        logits = run.graph(program.step.graph, program.params, feeds(program, "step", tokens))[
            list(program.step.output_nodes()).index("logits")
        ]
        odds = logits.float().log_softmax(-1).flatten(0, -2)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(odds.detach().exp(), 1, generator=generator)
        if odds.requires_grad:
            odds.gather(-1, drawn).sum().backward()
    return losses


class _Product(torch.autograd.Function):
    """x @ weight.T, the weight read again on the way back: no two of them are held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, read: Read, note: Note) -> Tensor:
        ctx.save_for_backward(x)
        ctx.read, ctx.note = read, note
        return F.linear(x, read())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.read()
        with torch.no_grad():
            ctx.note(weight, x.flatten(0, -2), gradient.flatten(0, -2))
            return gradient @ weight, None, None, None


class _Run(References):
    """The run forward, which notes at products of weights."""

    def __init__(
        self, program: Program, products: Mapping[fx.Node, str], note: Callable[[str], Note]
    ):
        self.params, self.products, self.note = program.params, products, note
        self.start = torch.zeros((), requires_grad=True)  # what makes the first product have one

    def value(
        self,
        node: fx.Node,
        params: Mapping[str, Tensor],
        inputs: Mapping[str, Any],
        values: Mapping[fx.Node, Any],
    ) -> Any:
        """See References."""
        if node not in self.products:
            return super().value(node, params, inputs, values)
        name = self.products[node]
        x, bias = (
            map_arg(operand_of(node, n), lambda n: operand(n, params, values))
            for n in ("input", "bias")
        )
        made = _Product.apply(x, self.start, lambda: self.params[name], self.note(name))  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias
