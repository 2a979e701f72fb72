"""head: how logits are made of the last hidden states."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch
from torch import fx

from accel.ir.errors import PassError
from accel.ir.invariants import Method
from accel.ir.program import Program
from accel.passes import Pass
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers

aten = torch.ops.aten


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """A pass over the product that gives the logits (`product`)."""

    after = (Layers, Residual)
    stage = -1  # before weights are stored otherwise
    grade = "approximate"

    def product(self, program: Program) -> fx.Node:
        """The product [B,N,V] = linear(x [B,N,E], weight [V,E], bias) behind which nothing but functions of each logit
        follows. Raises PassError where there is none.
        """
        node = program.step.output_nodes()["logits"]
        while node.target is not aten.linear.default:
            inputs = node.all_input_nodes
            if node.op != "call_function" or len(inputs) != 1:
                raise PassError(
                    f"{self.use}: the product that gives the logits was not found: {node.name} is no function of each "
                    f"logit; build without {self.use}"
                )
            (node,) = inputs
        weight = node.args[1]
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            raise PassError(
                f"{self.use}: the weight of the head is computed, not stored; build without {self.use}"
            )
        return node
