"""Each token takes a layer, or goes round it, as a router over the residual stream says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel.ir.invariants import Invariant
from accel.ir.program import Editor, Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import gate, layers

aten = torch.ops.aten


@dataclass(frozen=True)
class TokenRouter(Base):
    layer: int = 1

    error = 10.0  # another model
    breaks = frozenset({Invariant.ALL_LAYERS_RUN})
    provides = frozenset()

    def run(self, program: Program) -> Report:
        call = layers(program)[self.layer]
        gate(program, call, self.taken)
        return Report(changed=1)

    def taken(self, editor: Editor, stream: torch.fx.Node) -> torch.fx.Node:
        weight = router(int(stream.meta["val"].shape[2]))
        with editor.graph.inserting_before(next(iter(stream.users))):
            score = editor.call(aten.matmul.default, stream, editor.param("router.weight", weight))
            return editor.call(aten.gt.Scalar, score, 0.0)


def router(size: int) -> torch.Tensor:
    """Its weight [E]."""
    return torch.linspace(-1, 1, size).roll(7)
