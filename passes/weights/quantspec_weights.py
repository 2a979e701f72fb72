"""QuantSpec (arXiv:2502.10424): each weight in 4 bits that a draft reads, and 4 more that make it one of 8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from accel.ir.kv import COARSE
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import pack_blocks, quantized_embedding, quantized_linear
from accel.ir.program import Editor, Program
from accel.ir.weights import Origin
from accel.passes import Report
from accel.passes.clean.clean import forget_unused, replace
from accel.passes.weights._blocks import (
    NEAREST,
    Blocks,
    Packed,
    Site,
    encode,
    in_blocks,
    insert,
    rounded_scales,
    sites,
    stored_scales,
)
from accel.passes.weights._halves import LOWER, SCALES, UPPER, read_coarsely

_BITS = 4  # of either half
_FINER = 2**_BITS
_TOP = 7 + 7 / 16  # steps that both halves reach on the side that has no code 8
_CHUNK = 1 << 22  # elements of a weight that are rounded at a time


@dataclass(frozen=True)
class QuantspecWeights(Blocks):
    """Of each number U, in steps S of its block, and L, in steps of S / 16 what is off then: two products, which are
    added. With a cache that calls read coarsely (`kv.codec = quantspec-kv`), such a call leaves the second one out. One
    copy: 9 bits with scales.

    Weights that a checkpoint holds in codes stay as they are, and drafts read those, unless `recode`: then they are
    rounded anew. Experts are of 8 bits, whoever reads them.
    """

    recode: bool = False

    error = 0.3  # of random weights, where errors grow from layer to layer

    @property
    def recodes(self) -> bool:
        return self.recode

    def bits(self, site: Site, layers: int) -> int:
        return 2 * _BITS

    def run(self, program: Program) -> Report:
        report = Report()
        found, report.refused = sites(program, self.smallest)
        layers = len(program.facts.layers)
        for site in found:
            if site.experts:
                packed = self.nearest(program, site, self.bits(site, layers))
                insert(program, site, packed, NEAREST)
            else:
                self._halves(program, site)
            report.changed += 1
        if COARSE in program.step.inputs:
            read_coarsely(program, program.step.input(COARSE))
        forget_unused(program)
        return report

    def _halves(self, program: Program, site: Site) -> None:
        params, stored = program.params, program.params.stored(site.name)
        weight = stored.read()
        upper = _upper(weight, self.block)
        parts = {UPPER: (upper, _nearest), LOWER: (_rest(weight, upper, self.block), _off)}
        for part, (packed, origin) in parts.items():
            stem = site.name + part
            params.put_away(stem, packed.q)
            params[stem + SCALES] = stored_scales(params, packed)
            params.origins[stem] = Origin(
                stored.changed(partial(origin, block=self.block)), NEAREST
            )
        for node in site.nodes:
            editor = Editor(program, node.graph)
            with node.graph.inserting_before(node):
                halves = [
                    self._half(editor, node, site, part, int(weight.shape[1])) for part in parts
                ]
                new = editor.call(torch.ops.aten.add.Tensor, *halves, like=node)
            replace(node, new)
        for graph in program.graphs():
            for unread in [n for n in graph.find_nodes(op="get_attr") if not n.users]:
                graph.erase_node(unread)

    def _half(self, editor: Editor, node: fx.Node, site: Site, part: str, width: int) -> fx.Node:
        """What a product or an embedding gives by one half; the bias belongs to the upper one."""
        stem = site.name + part
        parts = (editor.param(stem), editor.param(stem + SCALES), None)
        sizes = (_BITS, self.block)
        if node not in site.linears:
            ids = operand_of(node, "indices")
            return editor.call(quantized_embedding.default, ids, *parts, *sizes, width, like=node)
        x, bias = operand_of(node, "input"), operand_of(node, "bias") if part == UPPER else None
        return editor.call(quantized_linear.default, x, *parts, bias, *sizes, like=node)


def _upper(weight: Tensor, block: int) -> Packed:
    """The upper half, in steps by which both halves together reach the ends of a block."""
    rows = max(1, _CHUNK // weight.shape[1])
    codes, scales = list[Tensor](), list[Tensor]()
    for part in weight.split(rows):
        blocks = in_blocks(part, block)
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        most, other = torch.where(-low >= high, low, high), torch.minimum(-low, high)
        size = torch.maximum(most.abs() / (_FINER // 2), other / _TOP)
        step = rounded_scales(-most.sign() * size)
        middle = torch.full_like(step, _FINER // 2)
        codes.append(pack_blocks(encode(blocks, step, middle, _BITS), _BITS))
        scales.append(step.squeeze(-1))
    return Packed(torch.cat(codes), torch.cat(scales), None, _BITS, block)


def _rest(weight: Tensor, upper: Packed, block: int) -> Packed:
    """What is off, in 16ths of the upper half's steps."""
    scales = (upper.scales.float() / _FINER).bfloat16()  # exact: a power of two
    rows = max(1, _CHUNK // weight.shape[1])
    parts = []
    for start in range(0, len(weight), rows):
        end = start + rows
        part = Packed(upper.q[start:end], upper.scales[start:end], None, _BITS, block)
        off = in_blocks(weight[start:end], block) - in_blocks(part.weight(), block)
        steps = scales[start:end].float().unsqueeze(-1)
        middle = torch.full_like(steps, _FINER // 2)
        parts.append(pack_blocks(encode(off, steps, middle, _BITS), _BITS))
    return Packed(torch.cat(parts), scales.float(), None, _BITS, block)


def _nearest(weight: Tensor, block: int) -> Tensor:
    """A weight in its upper half alone."""
    if weight.is_meta:
        return torch.empty_like(weight)
    return _upper(weight, block).weight()[:, : weight.shape[1]]


def _off(weight: Tensor, block: int) -> Tensor:
    """What that leaves out."""
    return weight - _nearest(weight, block)
