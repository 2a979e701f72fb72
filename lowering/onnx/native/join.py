"""What stands around a native operator is done inside it: fewer nodes, and fewer passes over memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper

from accel.ir.weights import Offsets, composed
from accel.lowering.onnx.native import DOMAIN
from accel.lowering.onnx.writer.builder import MICROSOFT, Builder, reads, same_shape

# the numbers that native/linear.cc gives to them
GATES = {("QuickGelu", ""): 1, ("Gelu", "none"): 2, ("Gelu", "tanh"): 3}
_OPERANDS = {"Attention": 18, "AttentionInt8": 22, "AttentionFloat16": 18}  # in native/attention.cc
# attention -> what writes the slots that it reads
_PLACES = {
    "Attention": "Place", "AttentionInt8": "PlaceInt8", "AttentionGroups": "Place",
    "AttentionFloat16": "PlaceFloat16", "DrawnAttention": "Place", "DrawnAttentionInt8": "PlaceInt8",
    "DrawnAttentionFloat16": "PlaceFloat16",
}  # fmt: skip
# attention -> the same that also says what each slot draws, with three more operands
DRAWN = {
    "Attention": "DrawnAttention", "AttentionInt8": "DrawnAttentionInt8",
    "AttentionFloat16": "DrawnAttentionFloat16",
}  # fmt: skip
# what makes the codes that a step writes -> their type
_ENCODERS = {"Encode": torch.int8, "EncodeFloat16": torch.float16}
_DECODERS = ("Decode", "DecodeFloat16", "DecodeGroups", "LookUp")


def join(b: Builder, outputs: Collection[str]) -> None:
    """Let Linear take in offsets, norms, gates and sums, and Attention the layout of its rows and codes."""
    read = {value for node in b.nodes for value in reads(node)}.union(outputs)
    b.nodes = [n for n in b.nodes if n.op_type not in _DECODERS or read.intersection(n.output)]
    for rewrite in (_offsets, _norms, _gates, _sums, _draws, _places):
        rewrite(_Graph(b, outputs))


class _Graph:
    """The nodes written so far, by what they make and read."""

    def __init__(self, b: Builder, outputs: Collection[str]):
        self.b = b
        self.outputs = set(outputs)
        self.made = {o: n for n in b.nodes for o in n.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in b.nodes:
            for value in reads(node):
                self.readers[value].append(node)

    def of(self, op: str, domain: str = "") -> list[onnx.NodeProto]:
        return [n for n in self.b.nodes if n.op_type == op and n.domain == domain]

    def maker(self, value: str, op: str, domain: str = "") -> onnx.NodeProto | None:
        """The node of that kind that makes the value."""
        node = self.made.get(value)
        return node if node is not None and (node.op_type, node.domain) == (op, domain) else None

    def only(self, value: str, op: str, domain: str = "") -> onnx.NodeProto | None:
        """The same where one node reads the value, once, and nobody else needs it."""
        lonely = len(self.readers[value]) == 1 and value not in self.outputs
        return self.maker(value, op, domain) if lonely else None

    def reader(self, value: str, op: str) -> onnx.NodeProto | None:
        """The one node that reads the value, where it is of that kind."""
        found = self.readers[value]
        lonely = len(found) == 1 and value not in self.outputs
        return found[0] if lonely and found[0].op_type == op else None

    def rank(self, name: str) -> int | None:
        """Number of axes of a value, where it is known."""
        if isinstance(self.b.meta.get(name), torch.Tensor):
            return self.b.rank(name)
        return next((len(i.dims) for i in self.b.initializers if i.name == name), None)

    def ints(self, name: str) -> list[int]:
        """A constant's numbers; none where the value is not constant."""
        for initializer in self.b.initializers:
            if initializer.name == name and initializer.data_location == onnx.TensorProto.DEFAULT:
                return [int(i) for i in numpy_helper.to_array(initializer).flatten()]
        return []

    def before(self, node: onnx.NodeProto, values: Iterable[str]) -> list[onnx.NodeProto] | None:
        """What makes these values and comes after the node, in order; None where it needs what the node makes."""
        wanted, found = set(values), []
        for later in reversed(self.b.nodes):
            if later is node:
                break
            if wanted.intersection(later.output):
                found.append(later)
                wanted.update(reads(later))
        return None if wanted.intersection(node.output) - {""} else found[::-1]

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


def _offsets(g: _Graph) -> None:
    """Linear + sums of the input's blocks @ offsets: its weights are codes that have an offset for each block, which
    is read as it lies.
    """
    for total in g.of("Add"):
        for own, more in (total.input, list(total.input)[::-1]):
            linear, product = g.only(own, "Linear", DOMAIN), g.only(more, "MatMul")
            sums = g.maker(product.input[0], "ReduceSum") if product is not None else None
            blocks = g.maker(sums.input[0], "Reshape") if sums is not None else None
            if linear is None or product is None or sums is None or blocks is None:
                continue
            shape, axes = g.ints(blocks.input[1]), g.ints(sums.input[1])
            if axes not in ([-1], [len(shape) - 1]) or attributes(sums).get("keepdims", 1):
                continue
            if blocks.input[0] != linear.input[0]:
                continue
            if any(linear.input[5:8]) or shape[-1:] != [attributes(linear)["block"]]:
                continue
            param = g.b.composed.get(product.input[1])
            if param is None or not isinstance(offsets := composed(param.stored), Offsets):
                continue
            least = g.b.parts(param)[1]
            for operand, part in zip((7, 9), g.b.parts(least) or (least,), strict=False):
                _operand(linear, operand, g.b.weight(part))
            _set(linear, middle=offsets.middle)
            linear.output[0] = total.output[0]
            g.replace([product], total, linear)
            break
    g.b.prune(g.outputs)  # the shapes of blocks, which would be one more reader of a norm


def _norms(g: _Graph) -> None:
    """norm -> Linear: the norm is part of rounding the input."""
    for norm in g.of("RMSNormalization"):
        readers = g.readers[norm.output[0]]
        x, weight = norm.input[0], norm.input[1]
        last = attributes(norm).get("axis", -1) in (-1, (g.rank(x) or 0) - 1)
        if not last or norm.output[0] in g.outputs or g.rank(weight) != 1:
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
            if attributes(linear)["gate"] or axis not in (-1, (g.rank(split.input[0]) or 0) - 1):
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
            if linear is None or any(linear.input[6:7]) or not _alike(g.b, own, more):
                continue
            _operand(linear, 6, more)
            linear.output[0] = total.output[0]
            g.replace([], total, linear)
            break


def _draws(g: _Graph) -> None:
    """Attention, and later the same with what slots draw: one node, behind what it is given more."""
    for plain, wide in DRAWN.items():
        for drawn in g.of(wide, DOMAIN):
            operands, more = list(drawn.input), _OPERANDS[plain]
            alike = [*operands[:more]]
            while alike and not alike[-1]:
                alike.pop()
            same = [n for n in g.of(plain, DOMAIN) if list(n.input) == alike]
            before = g.before(same[0], operands[more:]) if len(same) == 1 else None
            given, own = attributes(drawn), attributes(same[0]) if same else {}
            if before is None or {n: given[n] for n in own if n != "partial"} != {
                n: v for n, v in own.items() if n != "partial"
            }:
                continue
            attention = same[0]
            attention.op_type = wide
            attention.input.extend(operands[len(attention.input) :])
            attention.output.extend([""] * (2 - len(attention.output)))
            attention.output.append(drawn.output[2])
            _set(attention, noise=given["noise"], seed=given["seed"])
            g.b.nodes = [n for n in g.b.nodes if n is not drawn]
            g.replace(before, attention, *before, attention)


def _places(g: _Graph) -> None:
    """Product of queries, keys and values, in one or values apart -> heads -> norms and rope -> cache and attention ->
    rows: Place, then Attention.
    """
    for attention in (n for op in _PLACES for n in g.of(op, DOMAIN)):
        cache = _cache(g, attention)
        back = g.reader(attention.output[0], "Transpose")
        rows = g.reader(back.output[0], "Reshape") if back is not None else None
        if cache is None or back is None or rows is None:
            continue
        asked = _asked(g, attention)
        q_side, k_side = _side(g, attention.input[0]), _side(g, cache.keys)
        parts = [q_side.start, k_side.start, cache.values]
        split = g.maker(parts[0], "Split")
        product = _product(g, split.input[0]) if split is not None else None
        apart = _product(g, cache.values) if split is not None and len(split.output) == 2 else None
        if split is None or product is None or list(split.output) != parts[: 2 if apart else 3]:
            continue
        if not (_placed_alike(g, q_side, k_side) and _cached(g, split, cache)):
            continue
        if not _turned(back) or g.rank(rows.output[0]) != 3:
            continue
        source, more = product.source, []
        if apart is not None:  # values are another product's: their weight has another form
            more = [_beside(attention.name, product.source, apart.source)]
            source = more[0].output[0]
        tables = list(q_side.rope.input[1:]) if q_side.rope is not None else [""] * 3
        turn = attributes(q_side.rope) if q_side.rope is not None else {}
        slots = cache.writes[0].input[2]
        held = [n.input[0] for n in cache.writes]
        place = helper.make_node(
            _PLACES[attention.op_type],
            [*held[2:], source, slots, *held[:2], *tables, q_side.norm, k_side.norm],
            [attention.input[0], *(n.output[0] for n in cache.writes)],
            name=f"{attention.name}.place", domain=DOMAIN, heads=g.ints(split.input[1])[0],
            interleaved=turn.get("interleaved", 0), turned=turn.get("rotary_embedding_dim", 0),
            q_epsilon=q_side.epsilon, k_epsilon=k_side.epsilon,
        )  # fmt: skip
        while not place.input[-1]:
            place.input.pop()
        attention.output[0] = rows.output[0]
        _set(attention, packed=1)
        gone = [*cache.codes, *q_side.nodes, *k_side.nodes, split, *product.nodes, back, rows]
        gone += apart.nodes if apart is not None else []
        for node in asked:  # Place gives queries by token
            place.output[0] = attention.input[0] = node.output[0]
        first, *others = cache.writes  # before whoever reads the cache beside attention
        g.replace([*gone, *asked, *others], first, *more, place)


@dataclass
class _Product:
    """Rows [B,T,..] that a product makes, and the nodes that make heads [B,H,T,D] of them."""

    source: str
    nodes: list[onnx.NodeProto]


def _product(g: _Graph, value: str) -> _Product | None:
    """Of heads that nobody else reads."""
    heads = g.only(value, "Transpose")
    rows = g.only(heads.input[0], "Reshape") if heads is not None else None
    if heads is None or rows is None or not _turned(heads):
        return None
    return _Product(rows.input[0], [heads, rows])


def _turned(node: onnx.NodeProto) -> bool:
    """Whether it makes tokens' heads of heads' tokens, or these of those."""
    return bool(attributes(node).get("perm") == [0, 2, 1, 3])


def _beside(name: str, *rows: str) -> onnx.NodeProto:
    """Rows of several products one beside another."""
    made = f"{name}.packed"
    return helper.make_node("Concat", [*rows], [made], name=made, axis=-1)


def _asked(g: _Graph, attention: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The node that gives queries by token, to the step's caller or to who chooses pages; no reader any more."""
    readers = g.readers[attention.input[0]]
    turned = [
        n for n in readers
        if n.op_type == "Transpose" and attributes(n)["perm"] == [0, 2, 1, 3]
    ]  # fmt: skip
    g.readers[attention.input[0]] = [n for n in readers if n not in turned[:1]]
    return turned[:1]


@dataclass
class _Cache:
    """The nodes that write what an attention reads (keys, values, the scales of both where they are int8),
    those that make codes or halves, and the keys and values before that.
    """

    writes: list[onnx.NodeProto]
    codes: list[onnx.NodeProto]
    keys: str
    values: str


def _cache(g: _Graph, attention: onnx.NodeProto) -> _Cache | None:
    """Of an attention over a cache that the step writes."""
    coded = attention.op_type.endswith("Int8")
    read = [*attention.input[1:3], *(attention.input[11:13] if coded else ())]
    writes = [n for n in (g.maker(i, "TensorScatter") for i in read) if n is not None]
    if len(writes) != len(read):
        return None
    makers = [g.maker(w.input[1], op, DOMAIN) for w in writes[:2] for op in _ENCODERS]
    codes = [n for n in makers if n is not None]
    if not codes and not coded:
        return _Cache(writes, [], writes[0].input[1], writes[1].input[1])
    made = [
        output for outputs in zip(*(n.output for n in codes), strict=True) for output in outputs
    ]
    if [w.input[1] for w in writes] != made or codes[0].op_type != codes[1].op_type:
        return None
    return _Cache(writes, codes, codes[0].input[0], codes[1].input[0])


@dataclass
class _Side:
    """What lies between the split and the attention: a norm's weight, a rope."""

    start: str
    rope: onnx.NodeProto | None
    norm: str
    epsilon: float
    nodes: list[onnx.NodeProto]


def _side(g: _Graph, value: str) -> _Side:
    rope = g.only(value, "RotaryEmbedding")
    value = rope.input[0] if rope is not None else value
    norm = g.only(value, "RMSNormalization")
    nodes = [n for n in (rope, norm) if n is not None]
    if norm is None:
        return _Side(value, rope, "", 0.0, nodes)
    return _Side(norm.input[0], rope, norm.input[1], attributes(norm)["epsilon"], nodes)


def _placed_alike(g: _Graph, q: _Side, k: _Side) -> bool:
    """Whether queries and keys turn by the same tables, if at all."""
    if any(g.rank(side.norm) != 1 for side in (q, k) if side.norm):
        return False
    if q.rope is None or k.rope is None:
        return q.rope is k.rope
    tables = list(q.rope.input[1:]) == list(k.rope.input[1:]) and len(q.rope.input) == 4
    return tables and attributes(q.rope) == attributes(k.rope)


def _cached(g: _Graph, split: onnx.NodeProto, cache: _Cache) -> bool:
    """Whether keys and values go, as they are split or apart, into the slots of a plain cache."""
    sizes = g.ints(split.input[1]) if len(split.input) > 1 else []
    buffers = [n.input[0] for n in cache.writes]
    shapes = [g.b.shape(name) for name in buffers]
    along = [attributes(n).get("axis") == 2 and len(n.attribute) == 1 for n in cache.writes]
    dtype = _ENCODERS[cache.codes[0].op_type] if cache.codes else torch.float32
    return (
        attributes(split).get("axis", 0) == 1
        and len(sizes) in (2, 3)
        and sizes[1:] == [shapes[0][1], shapes[1][1]][: len(sizes) - 1]
        and shapes[0][3] == shapes[1][3]
        and all(along)
        and len({n.input[2] for n in cache.writes}) == 1
        and all(g.b.dtype(name) == dtype for name in buffers[:2])
        and all(len(g.readers[name]) == 1 for name in (*split.output, cache.values, *buffers))
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
