"""The modules of a head that is a cascade, under conditions: a call runs one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from accel.ir.depth import APART, Depth
from accel.ir.ops.rows import take_rows
from accel.ir.program import Program
from accel.ir.taps import FINAL
from accel.passes import Pass, Report
from accel.passes.depth._joint import conditions
from accel.passes.fuse.residual import Residual
from accel.passes.state.layers import Layers


@dataclass(frozen=True)
class Cascade(Pass):
    """Of a head (`DraftHead.cascade`): an input `run_layers [L]`, the modules that a call runs, and an output
    `final [B,T,E]`, the states that the last of them gives of all tokens.
    """

    after = (Layers, Residual)
    must_change = True
    stage = 1

    def run(self, program: Program) -> Report:
        step = program.step
        (chosen,) = step.graph.find_nodes(op="call_function", target=take_rows.default)
        calls = conditions(program, APART)
        program.facts.depth = Depth((True,) * len(calls), APART)
        states = chosen.args[0]
        assert isinstance(states, fx.Node)
        step.set_outputs({**step.output_nodes(), FINAL: states})
        return Report(changed=len(calls))
