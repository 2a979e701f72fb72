"""Rotary embedding is recognised by what it computes: whatever turns pairs of channels by position."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import attention
from accel.ir.ops.op import operand_of, set_operand
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.region import Kinds, close, numbering, packet, source, try_out
from accel.passes.recognise.sides import positions_of

aten = torch.ops.aten
_NORMS = (aten.rms_norm, aten.layer_norm)
_END = 9223372036854775807  # an open end, as slices are exported
_BLOCK = 4096  # positions tried at a time


@dataclass
class _Tables:
    """Tables found so far: (cos [M,R/2], sin [M,R/2], interleaved) under a number."""

    entries: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class Rope(Pass):
    """The sub-graph between a query or key and its attention -> rope(x, positions, cos, sin).

    The sub-graph is tried on unit vectors. Any way of writing it (halves, interleaved, partial,
    scaled, fused) gives the same rotation matrix per position, out of which the tables are read. Pairs of neighbours
    that come out as halves are put apart first.
    Where only some channels turn, or a norm follows, it is found among the parts.

    Before and after: `tests/passes/texts/rope.before.txt`, `rope.after.txt`.
    """

    after = (Clean, Attention)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        finder = _Finder(program, Kinds(graph), numbering(graph), _Tables())
        for node in graph.find_nodes(op="call_function", target=attention.default):
            for name in "qk":
                operand = operand_of(node, name)
                assert isinstance(operand, fx.Node)
                with graph.inserting_before(node):
                    new = finder.rebuild(operand, swapped=False)
                if new is None:
                    why = "no rotation by position between it and a projection"
                    report.refused.append(f"{node.name}.{name}: {why}")
                    continue
                set_operand(node, name, new)
                report.changed += 1
        Clean().run(program)
        return report


@dataclass
class _Finder:
    """Looks for rotations in one graph."""

    program: Program
    kinds: Kinds
    order: dict[fx.Node, int]
    tables: _Tables

    def __post_init__(self) -> None:
        self.editor = Editor(self.program, self.program.step.graph)
        self.made: dict[tuple[fx.Node, bool], fx.Node | None] = {}

    def rebuild(self, value: fx.Node, swapped: bool) -> fx.Node | None:
        """The value [B,H,T,D] with its rotation as an operator; none where nothing turns.

        `swapped`: the value has axes [B,T,H,D], and its transpose is wanted.
        """
        key = (value, swapped)
        if key not in self.made:
            self.made[key] = self._rebuild(value, swapped)
        return self.made[key]

    def _rebuild(self, value: fx.Node, swapped: bool) -> fx.Node | None:
        call, op = self.editor.call, packet(value)
        if op is aten.transpose and {a % 4 for a in value.args[1:3]} == {1, 2}:  # type: ignore[operator]
            return self.rebuild(_first(value), not swapped)
        if op is torch.ops.accel.rms_norm or (op in _NORMS and len(value.args[1]) == 1):  # type: ignore[arg-type]
            inner = self.rebuild(_first(value), swapped)
            return inner and call(value.target, inner, *value.args[1:], like=value)  # type: ignore[arg-type]
        if op is aten.expand and len(sizes(_first(value))) == 4:
            inner = self.rebuild(_first(value), swapped)
            shape = list(value.args[1])  # type: ignore[arg-type]
            if swapped:
                shape[1], shape[2] = shape[2], shape[1]
            return inner and call(aten.expand.default, inner, shape, like=value)
        found = self._turn(value, swapped)
        if found is None and op is aten.cat and value.args[1:] in ((-1,), (3,)):
            parts: list[fx.Node] = value.args[0]  # type: ignore[assignment]
            new = [self.rebuild(p, swapped) for p in parts]
            if any(new):
                both = [n or self._transposed(p, swapped) for n, p in zip(new, parts, strict=True)]
                return call(aten.cat.default, both, -1, like=value)
        return found

    def _transposed(self, value: fx.Node, swapped: bool) -> fx.Node:
        return self.editor.call(aten.transpose.int, value, 1, 2, like=value) if swapped else value

    def _turn(self, value: fx.Node, swapped: bool) -> fx.Node | None:
        """rope(x) where the value is that, of the nearest x with the same channels."""
        want = sizes(value)
        if len(want) != 4 or not (want[3].isdigit() and want[1 + swapped].isdigit()):
            return None
        if swapped:
            want[1], want[2] = want[2], want[1]
        matched: list[tuple[int, bool, bool]] = []

        def accept(x: fx.Node) -> bool:
            flipped = _layout(x, want)
            if flipped is None:
                return False
            for apart in (False, True):
                number = _match(
                    self.program, x, value, (flipped, swapped), apart, want, self.tables
                )
                if number is not None:
                    matched.append((number, flipped, apart))
                    return True
            return False

        x = source(value, self.kinds, self.order, accept)
        if x is None:
            return None
        number, flipped, apart = matched[-1]
        cos, sin, interleaved = self.tables.entries[number]
        editor, x = self.editor, self._transposed(x, flipped)
        if apart:
            halves = [editor.call(aten.slice.Tensor, x, 3, i, _END, 2, like=value) for i in (0, 1)]
            x = editor.call(aten.cat.default, halves, -1, like=value)
        return editor.call(
            rope.default, x, positions_of(self.program, want[2]),
            editor.param(f"rope.{number}.cos", cos), editor.param(f"rope.{number}.sin", sin),
            interleaved, like=value,
        )  # fmt: skip


def _first(node: fx.Node) -> fx.Node:
    value = node.args[0]
    assert isinstance(value, fx.Node)
    return value


def _layout(x: fx.Node, want: list[str]) -> bool | None:
    """False where x has the axes [B,H,T,D] that are wanted, True where it is [B,T,H,D], None for neither."""
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 4:
        return None
    if sizes(x) == want:
        return False
    return True if sizes(x) == [want[0], want[2], want[1], want[3]] else None


def _match(
    program: Program,
    x: fx.Node,
    value: fx.Node,
    swapped: tuple[bool, bool],
    apart: bool,
    want: list[str],
    tables: _Tables,
) -> int | None:
    """The number of the table that turns x into the value; a new table where none does.

    `swapped` says of x and of the value whether its axes are [B,T,H,D]; `apart`: neighbours in x are halves where it
    is turned.
    """
    heads, width = int(want[1]), int(want[3])
    longest = program.facts.max_context
    if apart and width % 2:
        return None

    def run(sample: Tensor, positions: Tensor) -> Tensor:  # [B,H,T,D] -> [B,H,T,D]
        if apart:
            sample = sample.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        given = {x: sample.transpose(1, 2) if swapped[0] else sample}
        out = try_out(program, value, given, positions)
        return out.transpose(1, 2) if swapped[1] else out

    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, longest, (2, 5), generator=generator)
    sample = torch.randn(2, heads, 5, width, generator=generator)
    out = run(sample, positions)
    if close(out, sample, 1e-6):
        return None
    for number, table in enumerate(tables.entries):
        if 2 * table[0].shape[1] <= width and close(rope(sample, positions, *table), out):
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
    tables.entries.append(table)
    return len(tables.entries) - 1


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
