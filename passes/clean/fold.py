"""Compute once, at compile time, what depends on parameters alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel.ir.program import Editor, Program, evaluate
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace

LARGEST = (
    1 << 20
)  # elements: larger results stay computations, so that weights are not stored twice


@dataclass(frozen=True)
class Fold(Pass):
    """f(parameters) -> a parameter, where the result is small.

    Before and after: `tests/passes/texts/fold.before.txt`, `fold.after.txt`.
    """

    after = (Clean,)

    def run(self, program: Program) -> Report:
        report = Report()
        for graph in list(program.graphs()):
            editor = Editor(program, graph)
            constant = set()
            for node in graph.nodes:
                if node.op == "get_attr" or (
                    node.op == "call_function"
                    and isinstance(node.meta.get("val"), torch.Tensor)
                    and all(n in constant for n in node.all_input_nodes)
                    and all(isinstance(d, int) for d in node.meta["val"].shape)
                ):
                    constant.add(node)
            for node in list(graph.nodes):
                last = node in constant and any(u not in constant for u in node.users)
                if not last or node.op == "get_attr" or node.meta["val"].numel() > LARGEST:
                    continue
                (value,) = evaluate([node], program.params, {})
                with graph.inserting_before(node):
                    new = editor.param(
                        f"folded.{len(program.params)}.{node.name}", value.contiguous()
                    )
                replace(node, new)
                report.changed += 1
        Clean().run(program)
        return report
