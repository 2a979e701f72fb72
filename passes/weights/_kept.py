"""Weights that a checkpoint holds in codes stay codes: they go into the operators of few bits unrounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.codes import Codes, codes_of, expert_codes, holds_codes
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import pack, pack_blocks, zero_bits
from accel.ir.program import Editor, Program
from accel.ir.weights import Experts, Offsets, Stored, Weights
from accel.passes import Pass, Report
from accel.passes.clean.clean import forget_unused
from accel.passes.weights import Base
from accel.passes.weights._blocks import (
    BLOCKS,
    OFFSETS,
    Packed,
    Site,
    as_rows,
    factored,
    insert,
    narrowed,
    sites,
    stacked,
    stored_scales,
)

aten = torch.ops.aten
_CHUNK = 1 << 22  # codes that are packed at a time
_SAME = 1e-3  # step of its codes that a row may be off: nothing is rounded


def keeping(program: Program, recipe_passes: Sequence[Pass]) -> list[Pass]:
    """A recipe's passes, after the one that keeps the codes of a checkpoint, where the program has any and no pass
    rounds them anew (`Base.recodes`).
    """
    anew = any(isinstance(one, Base) and one.recodes for one in recipe_passes)
    coded = not anew and any(holds_codes(program.params.stored(name)) for name in program.params)
    return (
        [Kept(), *recipe_passes] if coded and Kept() not in recipe_passes else list(recipe_passes)
    )


@dataclass(frozen=True)
class Kept(Base):
    """linear(x, weight) of which the weight lies as codes  ->  quantized_linear over these codes.

    Codes and scales keep their values; only the inputs are rounded, as the integer products do. Where groups are
    not in order, the inputs are gathered in the order of the groups. Offsets of groups multiply the sum of each
    group's inputs, in float32; of an embedding they are added to its rows. What no block form holds is computed in
    float32, as other weights are, and a recipe's own method may round it.
    """

    error = 0.3  # of random weights: what rounding the inputs may do, as in int8
    grade = "approximate"

    def run(self, program: Program) -> Report:
        report = Report()
        found, refused = sites(program, 0)
        for site in found:
            stored, order = program.params.stored(site.name), None
            lies, experts = codes_of(stored), expert_codes(stored)
            turned = isinstance(stored, Experts) and stored.turned
            if experts is not None and site.transposed == turned:
                packed = _experts(experts)
            elif lies is not None:
                codes = lies if lies.offsets is None else _centred(lies)
                order = _order(codes)
                packed = _packed(codes, order, _bits(codes))
                if order is not None and site.embeddings:
                    packed = "an embedding reads it, and its groups are not in order"
            else:
                continue
            if isinstance(packed, str):
                report.refused.append(f"{site.name}: {packed}")
                continue
            origin = stored.changed(as_rows) if site.transposed else stored
            if order is not None:
                _gather(program, site, order)
                origin = origin.changed(partial(_in_order, order=order))
            scales = stored_scales(program.params, packed)
            if lies is not None and lies.offsets is not None:
                less = _offsets(program.params, lies, packed.name_of(site, "scales"), scales)
                _add_offsets(program, site, less, lies.group)
                _add_rows(program, site, less, lies.group)
                origin = origin.changed(partial(_without, offsets=less, group=lies.group))
            insert(program, site, packed, _SAME, origin, scales)
            report.changed += 1
        forget_unused(program)
        told = {line.split(":")[0] for line in report.refused}
        for name in program.params:
            if holds_codes(program.params.stored(name)) and name not in told:
                why = [line for line in refused if line.startswith(f"{name}:")]
                report.refused += why or [f"{name}: it is not read as it lies"]
        return report


def _order(codes: Codes) -> Tensor | None:
    """The columns [K] as they stand in groups; none where they lie so."""
    return None if codes.groups is None else codes.groups.argsort(stable=True)


def _bits(codes: Codes) -> int:
    """Those that the codes of a matrix are packed in: their own, or the next that there are."""
    few = max(2, codes.bits)
    apart = bool((codes.zeros != codes.zeros[0, 0]).any())
    return 8 if few > 6 or (few > 4 and apart) else few


def _packed(codes: Codes, order: Tensor | None, bits: int) -> Packed | str:
    """The same numbers in blocks that the kernels take, or why there are none."""
    columns, group = codes.q.shape[1], codes.group
    q, zeros = codes.q, codes.zeros
    if order is not None:
        if not torch.equal(codes.groups[order], torch.arange(columns) // group):  # type: ignore[index]
            return f"its groups are not of {group} columns each"
    many = -(-columns // group)
    fitting = [
        b for b in BLOCKS if group % b == 0 or (many == 1 and (b <= columns or b == BLOCKS[0]))
    ]
    if not fitting:
        return (
            f"its groups of {group} columns are no multiple of {BLOCKS[0]}, which the kernels take"
        )
    block = fitting[-1]
    blocks = -(-columns // block)
    per_block = torch.arange(blocks) * block // group
    scales, zeros = codes.scales[:, per_block], zeros[:, per_block]
    shift = _to_middle(q, zeros, bits)
    packed: list[Tensor] = []
    for part in q.split(max(1, _CHUNK // columns)):
        if order is not None:
            part = part[:, order]
        if shift:
            part = (part.short() + shift).to(torch.uint8)
        part = F.pad(part, (0, blocks * block - columns)).unflatten(1, (blocks, block))
        packed.append(pack_blocks(part, bits))
    offsets = pack(zeros, zero_bits(bits)) if shift is None else None
    levels = codes.scale_levels if block == group else None
    return Packed(torch.cat(packed), scales.contiguous(), offsets, bits, block, levels)


def _experts(experts: Sequence[Codes]) -> Packed | str:
    """The same of each expert of a weight."""
    if any(codes.groups is not None or codes.offsets is not None for codes in experts):
        return "its experts have groups out of order, or groups with offsets"
    found: list[Packed] = []
    for codes in experts:
        packed = _packed(codes, None, 4 if codes.bits <= 4 else 8)
        if isinstance(packed, str):
            return packed
        found.append(packed)
    if len({(packed.bits, packed.block) for packed in found}) > 1:
        return "its experts have codes of several layouts"
    if any(packed.zeros is not None for packed in found):
        found = [_uncentred(packed) for packed in found]
    return stacked(found)


def _uncentred(packed: Packed) -> Packed:
    """With zero points, as others have them."""
    if packed.zeros is not None:
        return packed
    middle = torch.full(packed.scales.shape, 2 ** (packed.bits - 1), dtype=torch.uint8)
    return replace(packed, zeros=pack(middle, packed.bits))


def _to_middle(q: Tensor, zeros: Tensor, bits: int) -> int | None:
    """What moves the codes so that their common zero point is in the middle; none where they have none, or leave the
    range by it.
    """
    zero = int(zeros[0, 0])
    if bool((zeros != zero).any()):
        return None
    shift = 2 ** (bits - 1) - zero
    low, high = (int(v) + shift for v in q.aminmax())
    return shift if low >= 0 and high < 2**bits else None


def _centred(codes: Codes) -> Codes:
    """The same codes with their zero points in the middle of their range, which `_offsets` makes up for: integer
    products then round their inputs with less effect.
    """
    return replace(codes, zeros=torch.full_like(codes.zeros, 2 ** (codes.bits - 1)))


def _offsets(params: Weights, codes: Codes, name: str, scales: Stored) -> Offsets:
    """Of a weight's groups whose zero points move to the middle: [G,N]. scales: the parameter of that name."""
    assert codes.offsets is not None
    zero, middle = int(codes.zeros[0, 0]), 2 ** (codes.bits - 1)
    if bool((codes.zeros != zero).any()):
        moved = codes.offsets + (middle - codes.zeros.float()) * codes.scales
        return Offsets.of_blocks(name, scales, params.hold(moved), 0)
    levels = codes.offset_levels
    least = params.hold(narrowed(codes.offsets)) if levels is None else factored(params, levels)
    return Offsets.of_blocks(name, scales, least, middle - zero)


def _in_order(weight: Tensor, order: Tensor) -> Tensor:
    """The columns of a weight [N,K] in an order [K]."""
    return weight[:, order.to(weight.device)]


def _without(weight: Tensor, offsets: Stored, group: int) -> Tensor:
    """A weight [N,K] less the offset of each group of columns, stored [G,N]."""
    if weight.is_meta:
        return weight
    less = offsets.read().t()
    if weight.shape[1] == less.shape[1] * group:  # nothing as large as the weight beside it
        return torch.flatten(weight.unflatten(1, (-1, group)) - less[..., None], 1)
    return weight - less.repeat_interleave(group, dim=1)[:, : weight.shape[1]]


def _add_offsets(program: Program, site: Site, offsets: Offsets, group: int) -> None:
    """Add to a site's products what the offsets [G,N] of their weight's groups give."""
    name = f"{site.name}{OFFSETS}"
    program.params[name] = offsets
    for node in site.linears:
        editor = Editor(program, node.graph)
        x = operand_of(node, "input")
        with node.graph.inserting_before(node.next):
            groups = editor.call(
                aten.unflatten.int, x, -1, [offsets.blank.shape[0], group], like=node
            )
            sums = editor.call(aten.sum.dim_IntList, groups, [-1], like=node)
            more = editor.call(aten.matmul.default, sums, editor.param(name), like=node)
            whole = editor.call(aten.add.Tensor, node, more, like=node)
        for user in [user for user in node.users if user is not whole]:
            user.replace_input_with(node, whole)


def _add_rows(program: Program, site: Site, offsets: Offsets, group: int) -> None:
    """Add to the rows that a site's embeddings read what the offsets [G,N] of their groups give."""
    if not site.embeddings:
        return
    name, width = f"{site.name}{OFFSETS}.rows", int(program.params.blank(site.name).shape[1])
    program.params.put_away(name, offsets.read().t().contiguous())
    for node in site.embeddings:
        editor = Editor(program, node.graph)
        indices = operand_of(node, "indices")
        assert isinstance(indices, fx.Node)
        kept = [-1] * (indices.meta["val"].dim() + 1)
        with node.graph.inserting_before(node.next):
            rows = editor.call(aten.embedding.default, editor.param(name), indices, like=node)
            wide = editor.call(aten.unsqueeze.default, rows, -1, like=node)
            each = editor.call(aten.expand.default, wide, [*kept, group], like=node)
            flat = editor.call(aten.flatten.using_ints, each, -2, like=node)
            less = editor.call(aten.slice.Tensor, flat, -1, 0, width, like=node)
            whole = editor.call(aten.add.Tensor, node, less, like=node)
        for user in [user for user in node.users if user is not whole]:
            user.replace_input_with(node, whole)


def _gather(program: Program, site: Site, order: Tensor) -> None:
    """Let a site's products read their inputs [...,K] in an order."""
    for node in site.linears:
        editor = Editor(program, node.graph)
        x = operand_of(node, "input")
        assert isinstance(x, fx.Node)
        with node.graph.inserting_before(node):
            index = editor.param(f"{site.name}.order", order)
            node.update_arg(0, editor.call(aten.index_select.default, x, -1, index, like=node))
