"""Which weights a graph keeps in other files: read from the protobuf bytes, without the package `onnx`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_EXTERNAL = 1  # TensorProto.DataLocation
_INNER = {  # message -> the fields that lead to tensors, by their numbers in onnx.proto
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}


@dataclass(frozen=True)
class ExternalTensor:
    """A TensorProto whose data lies elsewhere, and what it says of where ("location", "offset", "length")."""

    name: str
    where: dict[str, str]


def external_tensors(model: bytes) -> Iterator[ExternalTensor]:
    """Every external tensor of a ModelProto: initialisers, attributes, sub-graphs and functions too.

    Raises ValueError where the bytes are not protobuf, or hold no graph.
    """
    found = [("model", memoryview(model))]
    if not any(number == 7 for number, _ in _fields(found[0][1])):
        raise ValueError("it holds no graph")
    while found:
        kind, data = found.pop()
        if kind == "tensor":
            if tensor := _external(data):
                yield tensor
            continue
        for number, value in _fields(data):
            if number in _INNER[kind]:
                found.append((_INNER[kind][number], _message(value)))


def _external(data: memoryview) -> ExternalTensor | None:
    """The tensor, where it is external: by its data_location, or because it names a place."""
    name, location, where = "", 0, {}
    for number, value in _fields(data):
        if number == 8:
            name = _text(value)
        elif number == 14 and isinstance(value, int):
            location = value
        elif number == 13:
            entry = dict(_fields(_message(value)))
            where[_text(entry.get(1, memoryview(b"")))] = _text(entry.get(2, memoryview(b"")))
    return ExternalTensor(name, where) if where or location == _EXTERNAL else None


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field of a message; fixed-size numbers, which nothing here reads, as 0."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | memoryview = 0
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if not number or at > len(data):
            raise ValueError(f"a field is cut off at byte {at}")
        yield number, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(the number that begins there, where it ends)."""
    found = 0
    for shift, byte in enumerate(data[at : at + 10]):
        found |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return found, at + shift + 1
    raise ValueError(f"a number is cut off at byte {at}")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where a message belongs")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8")
