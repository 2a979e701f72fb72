"""What stands around a native operator is done inside it: fewer nodes, and fewer passes over memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper

from accel.lowering.onnx.builder import MICROSOFT, Builder, same_shape
from accel.lowering.onnx.native import DOMAIN

# the numbers that native/linear.cc gives to them
GATES = {("QuickGelu", ""): 1, ("Gelu", "none"): 2, ("Gelu", "tanh"): 3}


def join(b: Builder, outputs: Collection[str]) -> None:
    """Let Linear take in norms, gates and sums, and Attention the layout of its rows."""
    for rewrite in (_norms, _gates, _sums, _places):
        rewrite(_Graph(b, outputs))


class _Graph:
    """The nodes written so far, by what they make and read."""

    def __init__(self, b: Builder, outputs: Collection[str]):
        self.b = b
        self.kept = set(outputs)
        self.made = {o: n for n in b.nodes for o in n.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in b.nodes:
            for value in node.input:
                self.readers[value].append(node)

    def of(self, op: str, domain: str = "") -> list[onnx.NodeProto]:
        return [n for n in self.b.nodes if n.op_type == op and n.domain == domain]

    def maker(self, value: str, op: str, domain: str = "") -> onnx.NodeProto | None:
        """The node of that kind that makes the value."""
        node = self.made.get(value)
        return node if node is not None and (node.op_type, node.domain) == (op, domain) else None

    def only(self, value: str, op: str, domain: str = "") -> onnx.NodeProto | None:
        """The same where one node reads the value, once, and nobody else needs it."""
        lonely = len(self.readers[value]) == 1 and value not in self.kept
        return self.maker(value, op, domain) if lonely else None

    def reader(self, value: str, op: str) -> onnx.NodeProto | None:
        """The one node that reads the value, where it is of that kind."""
        found = self.readers[value]
        lonely = len(found) == 1 and value not in self.kept
        return found[0] if lonely and found[0].op_type == op else None

    def ints(self, name: str) -> list[int]:
        """A constant's numbers; none where the value is not constant."""
        for initializer in self.b.initializers:
            if initializer.name == name and initializer.data_location == onnx.TensorProto.DEFAULT:
                return [int(i) for i in numpy_helper.to_array(initializer).flatten()]
        return []

    def replace(self, gone: Iterable[onnx.NodeProto], last: onnx.NodeProto, *new: Any) -> None:
        """Put nodes where the last one of a pattern stood, and drop the others."""
        drop = {id(n) for n in gone} | {id(n) for n in new} | {id(last)}
        nodes: list[onnx.NodeProto] = []
        for node in self.b.nodes:
            if node is last:
                nodes += new
            elif id(node) not in drop:
                nodes.append(node)
        self.b.nodes = nodes


def _norms(g: _Graph) -> None:
    """norm -> Linear: the norm is part of rounding the input."""
    for norm in g.of("RMSNormalization"):
        readers = g.readers[norm.output[0]]
        x, weight = norm.input[0], norm.input[1]
        last = attributes(norm).get("axis", -1) in (-1, g.b.rank(x) - 1)
        if not last or norm.output[0] in g.kept or g.b.rank(weight) != 1:
            continue
        if all(_is_linear(n) and list(n.input).count(norm.output[0]) == 1 for n in readers):
            for linear in readers:
                linear.input[0] = x
                _operand(linear, 5, weight)
                _set(linear, epsilon=attributes(norm)["epsilon"])
            g.replace([], norm)


def _gates(g: _Graph) -> None:
    """Linear -> halves -> activation of the first, times the second."""
    for product in g.of("Mul"):
        for first, second in (product.input, list(product.input)[::-1]):
            act = g.only(first, "QuickGelu", MICROSOFT) or g.only(first, "Gelu")
            split = g.only(act.input[0], "Split") if act is not None else None
            if act is None or split is None or list(split.output) != [act.input[0], second]:
                continue
            linear = g.only(split.input[0], "Linear", DOMAIN)
            given = attributes(act)
            kind = GATES.get((act.op_type, given.get("approximate", b"").decode()))
            sizes = g.ints(split.input[1]) if len(split.input) > 1 else []
            halves = len(sizes) == 2 and sizes[0] == sizes[1] and len(g.readers[second]) == 1
            if linear is None or not kind or not halves or given.get("alpha", 1.0) != 1.0:
                continue
            axis = attributes(split).get("axis", 0)
            if attributes(linear)["gate"] or axis not in (-1, g.b.rank(split.input[0]) - 1):
                continue
            linear.output[0] = product.output[0]
            _set(linear, gate=kind)
            g.replace([act, split], product, linear)
            break


def _sums(g: _Graph) -> None:
    """Linear + another value of the same shape."""
    for total in g.of("Add"):
        for own, more in (total.input, list(total.input)[::-1]):
            linear = g.only(own, "Linear", DOMAIN)
            if linear is None or len(linear.input) > 6 or not _alike(g.b, own, more):
                continue
            _operand(linear, 6, more)
            linear.output[0] = total.output[0]
            g.replace([], total, linear)
            break


def _places(g: _Graph) -> None:
    """Packed product -> heads -> norms and rope -> cache and attention -> rows: Place, then Attention."""
    for attention in g.of("Attention", DOMAIN):
        k, v = (g.maker(i, "TensorScatter") for i in attention.input[1:3])
        q_rope = g.only(attention.input[0], "RotaryEmbedding")
        k_rope = g.only(k.input[1], "RotaryEmbedding") if k is not None else None
        back = g.reader(attention.output[0], "Transpose")
        rows = g.reader(back.output[0], "Reshape") if back is not None else None
        if k is None or v is None or q_rope is None or k_rope is None or rows is None:
            continue
        q_norm = g.only(q_rope.input[0], "RMSNormalization")
        k_norm = g.only(k_rope.input[0], "RMSNormalization")
        parts = [
            norm.input[0] if norm is not None else rope.input[0]
            for norm, rope in ((q_norm, q_rope), (k_norm, k_rope))
        ] + [v.input[1]]
        split = g.maker(parts[0], "Split")
        heads = g.only(split.input[0], "Transpose") if split is not None else None
        packed = g.only(heads.input[0], "Reshape") if heads is not None else None
        if split is None or heads is None or packed is None or list(split.output) != parts:
            continue
        if not _placeable(g, split, heads, k, v, q_rope, k_rope, back, rows):
            continue
        norms = [n.input[1] if n is not None else "" for n in (q_norm, k_norm)]
        while norms and not norms[-1]:
            norms.pop()
        epsilons = [
            attributes(n)["epsilon"] if n is not None else 0.0 for n in (q_norm, k_norm)
        ]
        if any(g.b.rank(n) != 1 for n in norms if n):
            continue
        rope = attributes(q_rope)
        place = helper.make_node(
            "Place",
            [packed.input[0], *q_rope.input[1:], k.input[2], k.input[0], v.input[0], *norms],
            [q_rope.output[0], k.output[0], v.output[0]],
            name=q_rope.name, domain=DOMAIN, heads=g.ints(split.input[1])[0],
            interleaved=rope.get("interleaved", 0), turned=rope.get("rotary_embedding_dim", 0),
            q_epsilon=epsilons[0], k_epsilon=epsilons[1],
        )  # fmt: skip
        attention.output[0] = rows.output[0]
        _set(attention, packed=1)
        gone = [k, v, q_rope, k_rope, q_norm, k_norm, split, heads, packed, back, rows]
        g.replace((n for n in gone if n is not None), attention, place, attention)


def _placeable(
    g: _Graph,
    split: onnx.NodeProto,
    heads: onnx.NodeProto,
    k: onnx.NodeProto,
    v: onnx.NodeProto,
    q_rope: onnx.NodeProto,
    k_rope: onnx.NodeProto,
    back: Any,
    rows: onnx.NodeProto,
) -> bool:
    """Whether sizes, axes and tables are those that Place and Attention know."""
    sizes = g.ints(split.input[1]) if len(split.input) > 1 else []
    axes = attributes(heads).get("perm"), attributes(back).get("perm")
    whole = [0, 2, 1, 3], [0, 2, 1, 3]
    same_rope = (
        list(q_rope.input[1:]) == list(k_rope.input[1:])
        and len(q_rope.input) == 4
        and attributes(q_rope) == attributes(k_rope)
    )
    scatters = k.input[2] == v.input[2] and all(
        attributes(n).get("axis") == 2 and attributes(n).get("mode", b"linear") == b"linear"
        for n in (k, v)
    )
    caches = [k.input[0], v.input[0]]
    floats = all(g.b.dtype(i) == torch.float32 for i in caches)
    apart = all(len(g.readers[n]) == 1 for n in (*split.output, *caches))
    cache = g.b.shape(caches[0])
    return (
        axes == whole
        and attributes(split).get("axis", 0) == 1
        and len(sizes) == 3
        and sizes[1] == sizes[2] == cache[1]
        and cache[3] == g.b.shape(caches[1])[3]
        and g.b.rank(rows.output[0]) == 3
        and same_rope
        and scatters
        and floats
        and apart
    )


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _is_linear(node: onnx.NodeProto) -> bool:
    return (node.op_type, node.domain) == ("Linear", DOMAIN)


def _alike(b: Builder, a: str, c: str) -> bool:
    """Whether two values are known to have one shape."""
    known = all(isinstance(b.meta.get(x), torch.Tensor) for x in (a, c))
    return known and same_shape(b.shape(a), b.shape(c))


def _operand(node: onnx.NodeProto, index: int, value: str) -> None:
    node.input.extend([""] * (index + 1 - len(node.input)))
    node.input[index] = value


def _set(node: onnx.NodeProto, **values: Any) -> None:
    kept = [a for a in node.attribute if a.name not in values]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in values.items())])
