"""What a value was decoded from, so far as native attention reads it in place: by the operators that made it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx
import torch
from onnx import helper

from accel.ir.ops import groups, patched
from accel.lowering.onnx.writer.builder import Builder

Names = tuple[str | None, ...]
_ROWS = 256  # of a block, so that a byte says a place in a channel


@dataclass(frozen=True)
class Codes:
    """Blocks of codes; of no `bits`: a mask, and as `scale` the numbers that are there."""

    codes: str
    scale: str
    least: str | None
    bits: int
    group: int
    along: int
    rows: int
    width: int

    @property
    def kind(self) -> tuple[int, ...]:
        """All but the values."""
        return self.bits, self.group, self.along, self.rows, self.width


@dataclass(frozen=True)
class Stored:
    """Codes, and what lies beside them. `coarse`: the bool [] under which the finer codes are not read."""

    codes: Codes
    finer: str | None = None
    product: tuple[str, str] | None = None
    numbers: tuple[str, str] | None = None
    down: int = 0
    coarse: str | None = None

    @property
    def extra_operands(self) -> Names:
        """In the order of native/attention.cc."""
        left, right = self.product or (None, None)
        value, place = self.numbers or (None, None)
        return self.finer, place, left, right, value

    @property
    def plain(self) -> bool:
        """Whether nothing lies beside the codes."""
        return bool(self.codes.bits) and not any(self.extra_operands)


def stored_of(b: Builder, value: str) -> Stored | None:
    """What made a value [B,G,C,D]; None where native attention reads floats of it."""
    for call in b.lowered.get(value, []):
        made = _READ.get(call.node.target)
        if made is not None:
            return made(b, *call.operands)  # type: ignore[no-any-return]
    return _either(b, value)


def _groups(
    b: Builder, codes: str, scale: str, least: str, bits: int, group: int, along: str, *rest: Any
) -> Stored | None:
    (rows, width), (finer,) = rest[:2], (*rest[2:], None)[:1]
    if b.rank(codes) != 4:
        return None
    found = Codes(codes, scale, least, bits, group, int(along == "rows"), rows, width)
    return Stored(found, finer)


def _few(b: Builder, value: str, mask: str, rows: int, width: int) -> Stored:
    return Stored(Codes(mask, value, None, 0, 0, 0, rows, width))


def _product(b: Builder, x: str, left: str, right: str, rows: int) -> Stored | None:
    found = stored_of(b, x)
    if not _bare(found, rows) or found is None or found.numbers:
        return None
    return replace(found, product=(left, right))


def _numbers(b: Builder, x: str, value: str, place: str, rows: int, along: str) -> Stored | None:
    found = stored_of(b, x)
    small = b.dtype(place) == torch.uint8 and rows <= _ROWS
    if not _bare(found, rows) or found is None or found.numbers or not small:
        return None
    return replace(found, numbers=(value, place), down=int(along == "rows"))


def _bare(stored: Stored | None, rows: int) -> bool:
    """Whether something may lie beside it."""
    return (
        stored is not None
        and stored.codes.bits > 0
        and stored.codes.rows == rows
        and not stored.coarse
    )


_READ: dict[Any, Any] = {
    groups.group_dequantize.default: _groups,
    patched.add_product.default: _product,
    patched.put_numbers.default: _numbers,
    patched.spread_rows.default: _few,
}


def _either(b: Builder, value: str) -> Stored | None:
    """Of a choice between two readings of the same, one of which leaves out the finer codes."""
    around = b.above[0] if b.above else []  # the graph that a branch is in
    node = next((n for n in reversed([*around, *b.nodes]) if value in n.output), None)
    if node is None or node.op_type != "If":
        return None
    few, whole = (stored_of(b, name) for name in _results(node, list(node.output).index(value)))
    if few is None or whole is None or not whole.finer or replace(whole, finer=None) != few:
        return None
    return replace(whole, coarse=node.input[0])


def _results(node: onnx.NodeProto, index: int) -> list[str]:
    """What an If gives for a result, where its bool holds and where it does not."""
    graphs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return [graphs[name].output[index].name for name in ("then_branch", "else_branch")]
