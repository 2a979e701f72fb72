"""What an ONNX file says of itself: what it takes and gives, its metadata, and where it keeps weights outside.

Read from the bytes (protobuf wire format, onnx.proto): the package `onnx` takes longer to import than all of this, and
an artifact is run without it. Only what may name a place of weights is looked into.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from accel.ir.errors import ArtifactError

# ONNX's numbers of element types, by the names that a manifest has
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
}  # fmt: skip
SMALL = 1 << 28  # bytes of any file that holds no large weights
OWN = "accel."  # what metadata of a build begins with
_PLACE = b"location"  # a weight outside has this key, as these bytes, however it is encoded
# Message -> number of a field -> the message in it: all that can hold a tensor.
_INNER = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; ONNX has no other


@dataclass(frozen=True)
class Value:
    """An input or output. dtype: a manifest's name of it, or ONNX's number; shape: None where it says none."""

    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class External:
    """Where a weight outside the graph lies, as the graph has it."""

    name: str
    place: dict[str, str]


@dataclass
class Graph:
    """defaults: inputs that may be left out. metadata: of the model. content: sha256 of all but a build's metadata."""

    inputs: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    metadata: dict[str, str] = field(default_factory=dict)
    content: str = ""
    external: list[External] = field(default_factory=list)


def read_graph(path: Path) -> Graph:
    """Raises ArtifactError where the file is no ONNX graph, and OSError."""
    try:
        return graph_of(read_small(path))
    except ValueError as error:
        raise ArtifactError(
            f"file {path.name!r} is not an ONNX graph ({error}); build the artifact again"
        ) from error


def graph_of(data: bytes) -> Graph:
    """The same of a ModelProto's bytes. Raises ValueError."""
    found, graphs, last, content = Graph(), 0, 0, hashlib.sha256()
    for number, start, end in fields(data, 0, len(data)):
        key, value = _entry(data, start, end) if number == 14 else ("", "")
        if not key.startswith(OWN):
            content.update(data[last:end])
        last = end
        if number == 14:
            if key in found.metadata:
                raise ValueError(f"it has two values of metadata {key!r}")
            found.metadata[key] = value
        elif number == 7:
            graphs += 1
            _signature(data, start, end, found)
    if graphs != 1:
        raise ValueError(f"it holds {graphs or 'no'} graphs")
    found.content = content.hexdigest()
    found.external = [_external(data, *span) for span in _tensors(data)]
    return found


def read_small(path: Path) -> bytes:
    """A file that is not of weights. Raises ArtifactError where it is larger than any such, and OSError."""
    if (size := path.stat().st_size) > SMALL:
        raise ArtifactError(
            f"file {path.name!r} has {size:,} bytes, where accel writes less than {SMALL:,}; do not trust it"
        )
    return path.read_bytes()


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number of each field of a message, and where its value begins and ends; a number is where it begins."""
    while at < end:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _BYTES:
            size, at = varint(data, at)
        elif kind == _VARINT:
            size = varint(data, at)[1] - at
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + size > end:
            raise ValueError(f"a field at byte {at} ends after what it is in")
        yield number, at, at + size
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    if at < len(data) and data[at] < 128:
        return data[at], at + 1
    found = 0
    for place, byte in enumerate(data[at : at + 10]):
        found |= (byte & 127) << 7 * place
        if byte < 128:
            return found & (1 << 64) - 1, at + place + 1
    raise ValueError(f"a number that is cut off, or of more than 10 bytes, at byte {at}")


def _entry(data: bytes, start: int, end: int) -> tuple[str, str]:
    """A StringStringEntryProto."""
    texts = {n: data[a:b].decode("utf-8") for n, a, b in fields(data, start, end)}
    return texts.get(1, ""), texts.get(2, "")


def _signature(data: bytes, start: int, end: int, graph: Graph) -> None:
    """Note a GraphProto's inputs and outputs."""
    given = set()
    for number, a, b in fields(data, start, end):
        if number in (11, 12):
            name, value = _value(data, a, b)
            side = graph.inputs if number == 11 else graph.outputs
            if name in side:
                raise ValueError(f"two of its values are called {name!r}")
            side[name] = value
        elif number == 5:
            given.add(text_of(data, a, b, 8))
    graph.defaults = given & graph.inputs.keys()


def _value(data: bytes, start: int, end: int) -> tuple[str, Value]:
    """A ValueInfoProto of a tensor."""
    name, dtype, shape = "", "", None
    for number, a, b in fields(data, start, end):
        if number == 1:
            name = data[a:b].decode("utf-8")
        elif number == 2:
            for of_type, c, d in fields(data, a, b):
                if of_type != 1:
                    continue  # no tensor
                for part, e, f in fields(data, c, d):
                    if part == 1:
                        kind = varint(data, e)[0]
                        dtype = DTYPES.get(kind, str(kind))
                    elif part == 2:
                        shape = tuple(_size(data, g, h) for n, g, h in fields(data, e, f) if n == 1)
    return name, Value(dtype, shape)


def _size(data: bytes, start: int, end: int) -> int | str | None:
    """A dimension."""
    found: int | str | None = None
    for number, a, b in fields(data, start, end):
        if number == 1:
            found = varint(data, a)[0]
        elif number == 2:
            found = data[a:b].decode("utf-8")
    return found


def text_of(data: bytes, start: int, end: int, number: int) -> str:
    """A text of a message."""
    texts = [data[a:b].decode("utf-8") for n, a, b in fields(data, start, end) if n == number]
    return texts[-1] if texts else ""


def _tensors(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each TensorProto lies that may have its data outside: initialisers and attributes, of inner graphs and
    functions too.
    """
    left = [("model", 0, len(data))]
    while left:
        message, start, end = left.pop()
        for number, a, b in fields(data, start, end):
            inner = _INNER[message].get(number)
            if inner is None or data.find(_PLACE, a, b) < 0:
                continue
            if inner == "tensor":
                yield a, b
            else:
                left.append((inner, a, b))


def _external(data: bytes, start: int, end: int) -> External:
    """The place that a TensorProto names."""
    place: dict[str, str] = {}
    for number, a, b in fields(data, start, end):
        if number == 13:
            key, value = _entry(data, a, b)
            if key in place:
                raise ValueError(f"a weight has two values of {key!r}")
            place[key] = value
    return External(text_of(data, start, end, 8), place)
