"""Rotary embedding is recognised by what it computes: whatever turns pairs of channels by position."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import attention
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.region import Kinds, close, numbering, sizes, source, try_out

aten = torch.ops.aten
_BLOCK = 4096  # positions tried at a time


@dataclass
class _Tables:
    """Tables found so far: (cos [M,R/2], sin [M,R/2], interleaved) under a number."""

    found: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class Rope(Pass):
    """The sub-graph between a query or key and its attention -> rope(x, positions, cos, sin).

    The sub-graph is tried on unit vectors. Any way of writing it (halves, interleaved, partial,
    scaled, fused) gives the same rotation matrix per position, out of which the tables are read.
    """

    after = (Clean, Attention)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds, order, tables = Kinds(graph), numbering(graph), _Tables()
        for node in graph.find_nodes(op="call_function", target=attention.default):
            for index, name in enumerate("qk"):
                operand = node.args[index]
                assert isinstance(operand, fx.Node)
                why = self._turn(program, kinds, order, tables, node, operand)
                if why:
                    report.refused.append(f"{node.name}.{name}: {why}")
                else:
                    report.changed += 1
        Clean().run(program)
        return report

    def _turn(
        self,
        program: Program,
        kinds: Kinds,
        order: dict[fx.Node, int],
        tables: _Tables,
        user: fx.Node,
        operand: fx.Node,
    ) -> str:
        """Replace one operand's rotation; the reason where there is none."""
        matched: list[tuple[int, bool]] = []

        def accept(x: fx.Node) -> bool:
            swapped = _layout(x, operand)
            if swapped is None:
                return False
            number = _match(program, x, operand, swapped, tables)
            if number is not None:
                matched.append((number, swapped))
            return number is not None

        x = source(operand, kinds, order, accept)
        if x is None:
            return "no rotation by position between it and a projection"
        number, swapped = matched[-1]
        cos, sin, interleaved = tables.found[number]
        graph = program.step.graph
        editor = Editor(program, graph)
        with graph.inserting_before(user):
            base = editor.call(aten.transpose.int, x, 1, 2, like=operand) if swapped else x
            new = editor.call(
                rope.default, base, program.step.input("positions"),
                editor.param(f"rope.{number}.cos", cos), editor.param(f"rope.{number}.sin", sin),
                interleaved, like=operand,
            )  # fmt: skip
        user.replace_input_with(operand, new)
        return ""


def _layout(x: fx.Node, operand: fx.Node) -> bool | None:
    """False where x has the operand's axes, True where tokens and heads are swapped, None where neither."""
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 4:
        return None
    want = sizes(operand)
    if sizes(x) == want:
        return False
    return True if sizes(x) == [want[0], want[2], want[1], want[3]] else None


def _match(
    program: Program, x: fx.Node, operand: fx.Node, swapped: bool, tables: _Tables
) -> int | None:
    """The number of the table that turns x into the operand; a new table where none does."""
    heads, width = (int(sizes(operand)[i]) for i in (1, 3))
    longest = program.facts.max_context

    def run(value: Tensor, positions: Tensor) -> Tensor:  # [B,H,T,D] -> [B,H,T,D]
        return try_out(
            program, operand, {x: value.transpose(1, 2) if swapped else value}, positions
        )

    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, longest, (2, 5), generator=generator)
    sample = torch.randn(2, heads, 5, width, generator=generator)
    out = run(sample, positions)
    if close(out, sample, 1e-6):
        return None
    for number, table in enumerate(tables.found):
        if close(rope(sample, positions, *table), out):
            return number
    structure = _structure(run, heads, width, positions[:, :2])
    if structure is None:
        return None
    first, interleaved = structure
    parts = []
    for block in torch.arange(longest).split(_BLOCK):
        unit = torch.zeros(1, heads, len(block), width)
        unit[..., first] = 1.0  # the first of each pair: the turned pair is (cos, sin)
        parts.append(run(unit, block[None])[0, 0].clone())
    turned = torch.cat(parts)
    second = first + 1 if interleaved else first + len(first)
    table = (turned[:, first].contiguous(), turned[:, second].contiguous(), interleaved)
    if not close(rope(sample, positions, *table), out):
        return None
    tables.found.append(table)
    return len(tables.found) - 1


def _structure(
    run: object, heads: int, width: int, positions: Tensor
) -> tuple[Tensor, bool] | None:
    """(first channel of each pair, interleaved), read off the matrix that a unit vector is turned by."""
    assert callable(run)
    unit = torch.eye(width)[:, None, None, :].expand(width, heads, positions.shape[1], width)
    out = run(unit.contiguous(), positions[:1].expand(width, -1).contiguous())[:, 0]  # [in,T,out]
    moved = (out - torch.eye(width)[:, None, :]).abs().amax(1) > 1e-6  # [in,out]
    channels = moved.any(1).nonzero().flatten()
    if len(channels) == 0 or int(channels[-1]) >= width:
        return None
    rotated = 2 * ((int(channels[-1]) + 2) // 2)
    partner = moved[0].nonzero().flatten()
    if len(partner) == 0:
        return None
    if int(partner[-1]) == 1 and rotated > 2:
        return torch.arange(0, rotated, 2), True
    return torch.arange(int(partner[-1])), False
