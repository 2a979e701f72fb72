"""What a call of the step must read and multiply, found in the graph that runs and in the shapes of the state.

Beside what a machine does at most (`peaks`) it says how near to the machine's limit a call is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.ir.entries.step import STEP
from accel.ir.facts import Facts, LayerFacts
from accel.ir.sizes import grows, per_slot
from accel.ir.state import Part, StateValue, Writer
from accel.lowering.onnx.native import DOMAIN
from accel.lowering.onnx.variants import PORTABLE
from accel.runtime.artifact.artifact import Artifact
from accel.runtime.artifact.nodes import Node, Nodes, Weight, read_nodes

ROWS = "rows"  # the step's input that says which tokens' logits are asked for
INT8, FLOAT32 = "int8", "float32"
_MICROSOFT = "com.microsoft"
# operators that read some rows of a table -> the operands that are such tables
_BY_ROW = {
    ("", "Gather"): (0,),
    ("", "GatherElements"): (0,),
    ("", "GatherND"): (0,),
    (_MICROSOFT, "GatherBlockQuantized"): (0, 2, 3),
    ("", "RotaryEmbedding"): (1, 2),
    (_MICROSOFT, "RotaryEmbedding"): (2, 3),
    (DOMAIN, "Place"): (4, 5),
    (DOMAIN, "PlaceInt8"): (6, 7),
    (DOMAIN, "KeyProducts"): (3, 4),
    (DOMAIN, "KeyProductsInt8"): (3, 4),
}
# products -> the operand that is a matrix of weights; the type of numbers that are multiplied
_PRODUCTS = {
    ("", "MatMul"): (1, FLOAT32),
    ("", "Gemm"): (1, FLOAT32),
    ("", "MatMulInteger"): (1, INT8),
    (_MICROSOFT, "FusedMatMul"): (1, FLOAT32),
    (_MICROSOFT, "DynamicQuantizeMatMul"): (1, INT8),
    (_MICROSOFT, "MatMulNBits"): (1, ""),
    (DOMAIN, "Linear"): (1, INT8),
}
_APART = ("MatMulNBits", _MICROSOFT)
_NORM = 5  # the operand of Linear that is as deep as the weights are; they lie in whole blocks
_ROUNDED = 4  # accuracy_level of MatMulNBits from which on its input is rounded to 8 bits
_CHOOSING = (Part.PAGES, Part.UNITS, Part.LOW_RANK, Part.CHOICE)  # state by which slots are chosen


@dataclass(frozen=True)
class Product:
    """A product with a matrix of weights [wide, deep]. kind: the type of numbers that are multiplied; bits: of a
    weight, as it lies; bytes: of all that the operator reads whole; asked: for the tokens alone whose logits are asked
    for.
    """

    node: Node
    deep: int
    wide: int
    bits: int
    kind: str
    bytes: int
    asked: bool

    @property
    def form(self) -> tuple[Any, ...]:
        """What makes it cost what it costs."""
        set_ = tuple(sorted(self.node.settings.items()))
        given = tuple(map(bool, self.node.inputs))
        return self.node.domain, self.node.op, self.deep, self.wide, self.bits, set_, given


@dataclass(frozen=True)
class Slots:
    """State that grows: bytes of one token, of a layer that sees `window` tokens at most (0: all)."""

    bytes: float
    window: int


@dataclass
class Work:
    """Of a variant of the step. weights: bytes that each call reads; rows: bytes of tables that each token reads;
    fixed: bytes of state whatever the tokens. unread: why it cannot be said what a call reads, where it cannot.
    """

    variant: str
    weights: int = 0
    rows: int = 0
    fixed: int = 0
    slots: list[Slots] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    layers: list[LayerFacts] = field(default_factory=list)
    unread: str = ""

    def state(self, depth: float) -> float:
        """Bytes of state that a step after `depth` tokens reads."""
        return self.fixed + sum(s.bytes * min(depth, s.window or depth) for s in self.slots)

    def read(self, depth: float) -> float:
        """Bytes that a step of one token reads after `depth` tokens, its own among them."""
        return self.weights + self.rows + self.state(depth)

    def multiplied(self, tokens: int) -> dict[str, float]:
        """Products of a prompt of so many tokens of which the last one's logits are asked for, by type. Attention's are
        of float32: each token's with itself and those before it that its layer sees.
        """
        found: Counter[str] = Counter()
        for one in self.products:
            found[one.kind] += one.deep * one.wide * (1 if one.asked else tokens)
        for layer in self.layers:
            seen = min(tokens, layer.window or tokens)
            pairs = seen * (seen + 1) // 2 + (tokens - seen) * seen
            found[FLOAT32] += 2 * layer.num_heads * layer.head_dim * pairs
        return {kind: float(count) for kind, count in found.items() if count}


def work_of(artifact: Artifact, variant: str) -> Work:
    """Of the step of an artifact, as a variant. Raises ArtifactError, OSError."""
    graphs = artifact.entries[STEP.name].graphs
    graph = read_nodes(artifact.path / graphs.get(variant, graphs[PORTABLE]))
    found = Work(variant, layers=list(artifact.facts.layers))
    _weights(graph, found)
    _state([v for v in artifact.state if v.name in graph.inputs], artifact.facts, found)
    return found


def _weights(graph: Nodes, work: Work) -> None:
    """Note what operators read, each place once: whole where one of them reads it whole."""
    whole, rows = dict[tuple[str, ...], int](), dict[tuple[str, ...], int]()
    asked = {ROWS}
    for node, weights in _walk(graph, {}, work):
        if asked.intersection(node.inputs):
            asked.update(node.outputs)
        by_row = _BY_ROW.get((node.domain, node.op), ())
        read = [(i, weights[name]) for i, name in enumerate(node.inputs) if name in weights]
        for i, weight in read:
            if i not in by_row:
                whole[weight.place] = weight.bytes
            elif len(weight.shape) > 2:
                work.unread = work.unread or f"{node.op} reads the weights that its data choose"
            else:
                rows[weight.place] = weight.bytes // max(1, weight.shape[0])
        if (node.op, node.domain) == _APART and node.inputs[1] not in weights:
            work.unread = work.unread or f"{node.op} reads codes that are taken apart at the load"
        if (one := _product(node, weights, bool(asked.intersection(node.inputs)))) is not None:
            work.products.append(one)
    work.weights = sum(whole.values())
    work.rows = sum(size for place, size in rows.items() if place not in whole)


def _walk(
    graph: Nodes, outer: Mapping[str, Weight], work: Work
) -> Iterator[tuple[Node, Mapping[str, Weight]]]:
    """Every operator that runs, with the weights that it may name. Of a choice between two graphs the one that reads
    more; a loop over weights runs as often as its data say.
    """
    weights = {**outer, **graph.weights}
    for node in graph.nodes:
        yield node, weights
        if not node.inner:
            continue
        inside = [list(_walk(g, weights, work)) for g in node.inner.values()]
        sizes = [_read(one) for one in inside]
        if node.op != "If" and any(sizes):
            work.unread = work.unread or f"{node.op} reads weights as often as its data say"
        yield from inside[sizes.index(max(sizes))]


def _read(nodes: list[tuple[Node, Mapping[str, Weight]]]) -> int:
    """Bytes of matrices among what operators read."""
    found = {
        w.place: w.bytes
        for node, weights in nodes
        for name in node.inputs
        if (w := weights.get(name)) is not None and len(w.shape) > 1
    }
    return sum(found.values())


def _product(node: Node, weights: Mapping[str, Weight], asked: bool) -> Product | None:
    """The product that an operator is; None where it is none with weights."""
    place, kind = _PRODUCTS.get((node.domain, node.op), (0, ""))
    matrix = weights.get(node.inputs[place]) if place and len(node.inputs) > place else None
    if matrix is None or len(matrix.shape) < 2:
        return None
    whole = sum(weights[name].bytes for name in {*node.inputs} if name in weights)
    bits = int(node.settings.get("bits", 0))
    if not bits:
        turned = node.settings.get("transB", 0)
        deep, wide = matrix.shape[-2:] if not turned else matrix.shape[:-3:-1]
        bits = 8 * matrix.bytes // max(1, matrix.numbers)
    else:
        wide = matrix.shape[0]
        norm = weights.get(node.inputs[_NORM]) if len(node.inputs) > _NORM else None
        padded = 8 * math.prod(matrix.shape[1:]) // bits
        deep = int(node.settings.get("K", norm.numbers if norm is not None else padded))
    if not kind:
        kind = INT8 if int(node.settings.get("accuracy_level", 0)) >= _ROUNDED else FLOAT32
    return Product(node, deep, wide, bits, kind, whole, asked)


def _state(state: list[StateValue], facts: Facts, work: Work) -> None:
    """Note what steps read of the state."""
    windows = {i: layer.window for i, layer in enumerate(facts.layers)}
    for value in state:
        if value.writer is not Writer.STEP or value.part in _CHOOSING:
            work.unread = work.unread or f"how much of the cache a step reads ({value.name})"
        each = per_slot(value.shape) * np.dtype(value.dtype).itemsize
        if grows(value.shape):
            window = 0 if value.layer is None else windows.get(value.layer, 0)
            work.slots.append(Slots(each, window))
        else:
            work.fixed += int(each)
