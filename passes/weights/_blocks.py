"""Weights in blocks of few bits: which weights there are, rounding to nearest, and putting the result in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.codes import Levels
from accel.ir.ops.attention import attention
from accel.ir.ops.experts import expert_linear
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import (
    PRODUCTS,
    dequantize,
    pack,
    pack_blocks,
    quantized_embedding,
    quantized_expert_linear,
    quantized_linear,
    zero_bits,
)
from accel.ir.ops.rope import rope
from accel.ir.ops.rows import lookup
from accel.ir.program import Editor, Program
from accel.ir.weights import Factored, Origin, Stored, Weights
from accel.passes import Report
from accel.passes.clean.clean import forget_unused, replace
from accel.passes.recognise.experts import routes
from accel.passes.weights import Base

aten = torch.ops.aten
BLOCKS = (16, 32, 64, 128)  # what the kernels take
NEAREST = 1.0  # step of its codes that a number may be off; only at the end of their range is it more than half
CORRECTED = 2.0  # the same of a row where errors are fed back or ranges cut; 1.1 was measured on a real model
OFFSETS = ".offsets"  # how the names of offsets of a weight in codes end, which are no weights
# what they read is no weight, or lies in few bits already
_TABLES = {rope.default, lookup.default, attention.default, quantized_embedding.default, *PRODUCTS}
_CHUNK = 1 << 22  # elements of a weight that are rounded at a time


@dataclass(frozen=True)
class Packed:
    """A weight [N,K], or of experts [X,N,K], as the operators of `ir.ops.quantized` take it."""

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    block: int
    levels: Levels | None = None  # the scales of a weight [N,K], where they lie in two levels

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.q, self.scales, self.zeros) if t is not None)

    def weight(self) -> Tensor:
        """The float32 weight of a matrix, [N, blocks * block]."""
        return dequantize(self.q, self.scales, self.zeros, self.bits, self.block)

    def name_of(self, site: Site, part: str = "") -> str:
        """What its parts are called as parameters: its codes, and behind a dot `scales` and `zeros`."""
        return f"{site.name}.int{self.bits}" + (f".{part}" if part else "")


@dataclass
class Site:
    """A weight [N,K], or of experts [X,N,K], that only products and embeddings read, and where they stand."""

    name: str
    linears: list[fx.Node] = field(default_factory=list)
    embeddings: list[fx.Node] = field(default_factory=list)
    experts: list[fx.Node] = field(default_factory=list)
    transposed: bool = False  # the experts' weights lie as [X,K,N]
    layer: int | None = None  # counted from the front; none: outside the layers

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.linears, *self.embeddings, *self.experts]

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        """The experts' weights, [N,K] each."""
        return (weight.mT if self.transposed else weight).unbind()


@dataclass(frozen=True)
class Blocks(Base):
    """weight [N,K] -> codes, and a scale (and a zero point, unless `symmetric`) per row and block of `block` columns.

    Applies to matrices, embeddings and experts of at least `smallest` elements, not to convolutions. The integer
    matmuls also round their input, to 8 bits per block. A recipe that says nothing of the cache stores it by `codec`.
    """

    block: int = option(32, one_of=BLOCKS)
    symmetric: bool = True
    smallest: int = option(4096, least=0)

    grade = "approximate"
    codec: ClassVar[str] = "kv-float16"
    small: ClassVar[Mapping[str, Any]] = {"block": 16, "smallest": 256}

    @abstractmethod
    def bits(self, site: Site, layers: int) -> int:
        """Of a weight of a model of so many layers: 2 to 6, or 8."""

    def run(self, program: Program) -> Report:
        report = Report()
        found, report.refused = sites(program, self.smallest)
        layers = len(program.facts.layers)
        for site in found:
            packed = self.nearest(program, site, self.bits(site, layers))
            insert(program, site, packed, NEAREST)
            report.changed += 1
        forget_unused(program)
        return report

    def nearest(self, program: Program, site: Site, bits: int) -> Packed:
        """A site's weight, each block by itself."""
        symmetric = self.symmetric or bits in (5, 6)  # which have no zero points
        weight, how = program.params[site.name], (bits, self.block, symmetric)
        if not site.experts:
            return round_to_nearest(weight, *how)
        return stacked([round_to_nearest(expert, *how) for expert in site.matrices(weight)])


def sites(program: Program, smallest: int) -> tuple[list[Site], list[str]]:
    """The weights worth storing in few bits, in the order of their first use, and why others are not."""
    found: dict[str, Site] = {}
    other: dict[str, str] = {}
    for layer, graph in _graphs(program):
        for node in graph.find_nodes(op="get_attr"):
            name = str(node.target)
            blank = program.params.blank(name)
            if name.endswith(OFFSETS):
                continue
            if blank.dtype != torch.float32 or blank.dim() < 2 or blank.numel() < smallest:
                continue
            site = found.setdefault(name, Site(name, layer=layer))
            for user in node.users:
                if user.target is aten.linear.default and _reads_as(user, node, "weight"):
                    site.linears.append(user)
                    if routes(user):  # a few rows, of which an error gives other experts
                        other[name] = f"{name}: it is the router of a mixture of experts"
                elif user.target is aten.embedding.default and _reads_as(user, node, "weight"):
                    site.embeddings.append(user)
                elif user.target is expert_linear.default and _reads_as(user, node, "weight"):
                    site.experts.append(user)
                    site.transposed = bool(operand_of(user, "transposed"))
                elif user.target in _TABLES:
                    other[name] = ""
                else:
                    kind = getattr(user.target, "__name__", str(user.target))
                    other[name] = f"{name}: read by {kind}, which does not support packed weights"
    return [s for name, s in found.items() if name not in other], [w for w in other.values() if w]


def _graphs(program: Program) -> Iterator[tuple[int | None, fx.Graph]]:
    """Every graph with the number of the layer that it is."""
    for entry in program.entries.values():
        layer = 0
        for i, graph in enumerate(program.graphs(entry)):
            yield (None if i == 0 else layer), graph
            layer += i > 0


def _reads_as(user: fx.Node, node: fx.Node, name: str) -> bool:
    """Whether it reads the value as that operand, and as no other."""
    return operand_of(user, name) is node and list(user.args).count(node) == 1


def round_to_nearest(weight: Tensor, bits: int, block: int, symmetric: bool) -> Packed:
    """Each block by itself: the step that just reaches its largest value.

    Symmetric: the value of largest magnitude becomes code 0, so its sign is the scale's; codes go
    one step less far on the other side.
    """
    rows = max(1, _CHUNK // weight.shape[1])
    parts = [_round(part, bits, block, symmetric) for part in weight.split(rows)]
    q, scales, zeros = (
        None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)
    )
    assert q is not None and scales is not None
    return Packed(q, scales, zeros, bits, block)


def stacked(parts: Sequence[Packed]) -> Packed:
    """Experts [N,K] as one weight [X,N,K]."""
    columns = zip(*((p.q, p.scales, p.zeros) for p in parts), strict=True)
    q, scales, zeros = (None if column[0] is None else torch.stack(column) for column in columns)
    assert q is not None and scales is not None
    return Packed(q, scales, zeros, parts[0].bits, parts[0].block)


def _round(
    weight: Tensor, bits: int, block: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    blocks = in_blocks(weight, block)
    scales, offsets = steps(blocks, bits, symmetric)
    codes = encode(blocks, scales, offsets, bits)
    zeros = None if symmetric else pack(offsets.squeeze(-1), zero_bits(bits))
    return pack_blocks(codes, bits), scales.squeeze(-1), zeros


def in_blocks(weight: Tensor, block: int) -> Tensor:
    """[N,K] -> [N,blocks,block], padded with zeros."""
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % block))
    return padded.view(len(padded), -1, block)


def steps(blocks: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and the codes of zero [N,blocks,1] for blocks [N,blocks,block]."""
    middle, top = 2 ** (bits - 1), 2**bits - 1
    if symmetric:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        scales = rounded_scales(torch.where(-low >= high, low, high) / -middle)
        return scales, torch.full_like(scales, middle)
    low = blocks.amin(-1, keepdim=True).clamp(max=0)
    high = blocks.amax(-1, keepdim=True).clamp(min=0)
    scales = (high - low) / top
    scales = torch.where(scales == 0, 1, scales)
    return scales, (-low / scales).round().clamp(0, top)


def rounded_scales(scales: Tensor) -> Tensor:
    """Symmetric ones, rounded to bfloat16, in which they are stored: codes are those of the rounded ones. 1 in place
    of 0.
    """
    return torch.where(scales == 0, 1, scales).bfloat16().float()


def narrowed(numbers: Tensor) -> Tensor:
    """In bfloat16 or float16 where one of them holds all exactly: those of a checkpoint they may not."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal((half := numbers.to(dtype)).float(), numbers):
            return half
    return numbers


def factored(params: Weights, levels: Levels) -> Factored:
    """Numbers in two levels, each put away."""
    return Factored.of_parts(params.hold(levels.coarse), params.hold(levels.fine))


def stored_scales(params: Weights, packed: Packed) -> Stored:
    """A weight's scales in as few bytes as hold them exactly; those of experts in float32."""
    if packed.levels is not None:
        return factored(params, packed.levels)
    return params.hold(packed.scales if packed.scales.dim() > 2 else narrowed(packed.scales))


def encode(blocks: Tensor, scales: Tensor, offsets: Tensor, bits: int) -> Tensor:
    """The nearest codes, uint8."""
    return (blocks / scales + offsets).round().clamp(0, 2**bits - 1).to(torch.uint8)


def as_rows(experts: Tensor) -> Tensor:
    """[X,K,N] -> [X,N,K]."""
    return experts.mT


def insert(
    program: Program,
    site: Site,
    packed: Packed,
    off: float = CORRECTED,
    weight: Stored | None = None,
    scales: Stored | None = None,
) -> None:
    """Let a site's nodes read the packed weight; the results go to a file, not to memory.

    weight: what it stands for, [N,K] or [X,N,K], by default the site's; off: how many steps of its codes a row may be
    off. The numeric check goes by both. scales: as `stored_scales` has put them away.
    """
    stem = packed.name_of(site)
    if weight is None:
        stored = program.params.stored(site.name)
        weight = stored.changed(as_rows) if site.transposed else stored
    program.params.origins[stem] = Origin(weight, off)
    names = {"q": stem, **{part: packed.name_of(site, part) for part in ("scales", "zeros")}}
    program.params[names["scales"]] = scales or stored_scales(program.params, packed)
    for part, tensor in {"q": packed.q, "zeros": packed.zeros}.items():
        if tensor is not None:
            program.params.put_away(names[part], tensor)
    width = int(program.params.blank(site.name).shape[1])
    for node in site.nodes:
        editor = Editor(program, node.graph)
        with node.graph.inserting_before(node):
            q, steps_of = editor.param(names["q"]), editor.param(names["scales"])
            zeros = None if packed.zeros is None else editor.param(names["zeros"])
            sizes = (packed.bits, packed.block)
            if node in site.linears:
                bias = operand_of(node, "bias")
                new = editor.call(
                    quantized_linear.default,
                    operand_of(node, "input"),
                    q,
                    steps_of,
                    zeros,
                    bias,
                    *sizes,
                    like=node,
                )
            elif node in site.experts:
                new = editor.call(
                    quantized_expert_linear.default,
                    operand_of(node, "x"),
                    operand_of(node, "ids"),
                    q,
                    steps_of,
                    zeros,
                    *sizes,
                    like=node,
                )
            else:
                new = editor.call(
                    quantized_embedding.default, operand_of(node, "indices"), q, steps_of, zeros, *sizes, width,
                    like=node,
                )  # fmt: skip
        replace(node, new)
    for graph in program.graphs():
        for unread in [n for n in graph.find_nodes(op="get_attr") if not n.users]:
            graph.erase_node(unread)
