"""What an ONNX file computes: its operators, and the weights that they read. Read from the bytes, as `graph` is."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from accel.ir.errors import ArtifactError
from accel.runtime.artifact.graph import DTYPES, fields, read_small, text_of, varint

_BITS = {  # of a number, by ONNX's number of its type
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16, 21: 4, 22: 4,
}  # fmt: skip
_SIGNED = 1 << 63
_HALF = {16: "bfloat16"}  # beside those that a manifest has


@dataclass(frozen=True)
class Weight:
    """A constant of a graph. place: by which graphs share its bytes, in a file or in the graph itself."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    place: tuple[str, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass
class Node:
    """An operator. settings: its attributes that are a number or a text; inner: its graphs, by attribute."""

    op: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    settings: dict[str, int | float | str] = field(default_factory=dict)
    inner: dict[str, Nodes] = field(default_factory=dict)


@dataclass
class Nodes:
    """A graph's operators in their order, its weights by name, and the names of its inputs and outputs."""

    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def read_nodes(path: Path) -> Nodes:
    """Raises ArtifactError where the file is no ONNX graph, and OSError."""
    try:
        data = read_small(path)
        (graph,) = [(a, b) for number, a, b in fields(data, 0, len(data)) if number == 7]
        return _graph(data, *graph)
    except ValueError as error:
        raise ArtifactError(
            f"file {path.name!r} is not an ONNX graph ({error}); build the artifact again"
        ) from error


def _graph(data: bytes, start: int, end: int) -> Nodes:
    """A GraphProto."""
    found = Nodes()
    for number, a, b in fields(data, start, end):
        if number == 1:
            found.nodes.append(_node(data, a, b))
        elif number == 5:
            weight = _weight(data, a, b)
            found.weights[weight.name] = weight
        elif number in (11, 12):
            (found.inputs if number == 11 else found.outputs).append(text_of(data, a, b, 1))
    return found


def _node(data: bytes, start: int, end: int) -> Node:
    """A NodeProto."""
    found = Node()
    for number, a, b in fields(data, start, end):
        if number in (1, 2):
            (found.inputs if number == 1 else found.outputs).append(data[a:b].decode("utf-8"))
        elif number == 4:
            found.op = data[a:b].decode("utf-8")
        elif number == 7:
            found.domain = data[a:b].decode("utf-8")
        elif number == 5:
            _attribute(data, a, b, found)
    return found


def _attribute(data: bytes, start: int, end: int, node: Node) -> None:
    """Note an AttributeProto's number, text or graph."""
    name = text_of(data, start, end, 1)
    for number, a, b in fields(data, start, end):
        if number == 2:
            (node.settings[name],) = struct.unpack("<f", data[a:b])
        elif number == 3:
            value = varint(data, a)[0]
            node.settings[name] = value - 2 * _SIGNED if value >= _SIGNED else value
        elif number == 4:
            node.settings[name] = data[a:b].decode("utf-8", "replace")
        elif number == 6:
            node.inner[name] = _graph(data, a, b)


def _weight(data: bytes, start: int, end: int) -> Weight:
    """A TensorProto."""
    kind, shape, place = 0, list[int](), dict[str, str]()
    for number, a, b in fields(data, start, end):
        if number == 1:
            shape += _numbers(data, a, b)
        elif number == 2:
            kind = varint(data, a)[0]
        elif number == 13:
            place[text_of(data, a, b, 1)] = text_of(data, a, b, 2)
    name = text_of(data, start, end, 8)
    held = math.prod(shape) * _BITS.get(kind, 0) // 8
    where = (place["location"], place.get("offset", "0")) if "location" in place else (name,)
    return Weight(name, DTYPES.get(kind) or _HALF.get(kind, str(kind)), tuple(shape), held, where)


def _numbers(data: bytes, start: int, end: int) -> Iterator[int]:
    """One number of a repeated field, or all of them where they lie packed."""
    while start < end:
        number, start = varint(data, start)
        yield number
