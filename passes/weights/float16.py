"""Weights stored in float16 and converted to float32 at load: half the artifact size, float32 speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.experts import expert_linear
from accel.ir.program import Editor, Program
from accel.ir.weights import Origin
from accel.passes import Report
from accel.passes.clean.clean import forget_unused
from accel.passes.weights import Base

aten = torch.ops.aten
_WEIGHTED = (
    aten.linear.default,
    aten.embedding.default,
    aten.matmul.default,
    expert_linear.default,
)  # not rotation tables, which lose much more
_RANGE = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Float16(Base):
    """matrix or embedding [>= `smallest` elements] -> float16, cast to float32 where it is read.

    A tensor with values beyond float16's range (65504) stays float32.
    """

    smallest: int = option(4096, least=0)

    error = 2e-2
    grade = "approximate"
    small: ClassVar[Mapping[str, Any]] = {"smallest": 256}

    def run(self, program: Program) -> Report:
        report = Report()
        for graph in program.graphs():
            editor = Editor(program, graph)
            for node in list(graph.find_nodes(op="get_attr")):
                name = str(node.target)
                blank = program.params.blank(name)
                weighs = any(user.target in _WEIGHTED for user in node.users)
                if blank.dtype != torch.float32 or blank.numel() < self.smallest or not weighs:
                    continue
                half = f"{name}.f16"
                if half not in program.params and _largest(program.params[name]) > _RANGE:
                    report.refused.append(f"{name}: holds values beyond 65504")
                    continue
                program.params.origins[half] = Origin(program.params.stored(name), 1.0)
                for user in list(node.users):  # widened beside its use, not to be held until then
                    with graph.inserting_before(user):
                        narrow = editor.derived(half, name, Tensor.half)
                        wide = editor.call(aten._to_copy.default, narrow, dtype=torch.float32)
                    user.replace_input_with(node, wide)
                graph.erase_node(node)
                report.changed += 1
        forget_unused(program)
        return report


def _largest(tensor: Tensor) -> float:
    """The largest absolute value, without a copy of the tensor."""
    low, high = tensor.aminmax()
    return max(-float(low), float(high))
