"""A GGUF file -> its metadata and tensors, mapped and not read; damage is found before any work.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf reads it too, but trusts the counts in
it: a file that lies about the length of an array keeps it busy for ever.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from accel.ir.errors import CaptureError, extra, shown
from accel.ir.weights import Pages

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LONGEST = (
    2**24
)  # elements of a list or bytes of a text: vocabularies have 2^18 words, templates 2^17 letters
_AXES = 4  # that ggml's tensors have at most


class Damaged(ValueError):
    """What of a file is not as the format has it."""


@dataclass(frozen=True)
class GgufTensor:
    """`kind`: its type in ggml ("Q4_0"); `shape` as PyTorch has it; `data`: uint8 [n] over the mapped file."""

    kind: str
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class GgufFile:
    """Metadata by key, and tensors by name; of all parts where a model is split into several files."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    pages: Pages


def plain(name: str) -> str:
    """A name that a file gives, as an error shows it."""
    return shown(name)[1:-1]


def is_gguf(path: Path) -> bool:
    """Whether a path is taken for a GGUF file: by its name, or by how it begins."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Map a model's file, and its other parts where it is split.

    Raises:
        CaptureError: a part is missing, cut, damaged or of another version; or the package gguf is missing.
    """
    pages = Pages()
    first = _part(path, pages)
    many = first.fields.get("split.count", 1)
    if not isinstance(many, int) or many <= 1:
        return first
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != many:
        raise CaptureError(
            f"{path} is one of {many} parts of a model, and its name does not say which; give the parts their names "
            f"again (NAME-00001-of-{many:05d}.gguf, …)"
        )
    names = [f"{match[1]}-{i:05d}-of-{many:05d}.gguf" for i in range(1, many + 1)]
    if missing := next((name for name in names if not (path.parent / name).is_file()), None):
        raise CaptureError(
            f"{path} is one of {many} parts of a model, and {missing} is not beside it: fetch all parts"
        )
    parts = [_part(path.parent / name, pages) for name in names]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if twice := next((name for name in part.tensors if name in tensors), None):
            raise CaptureError(
                f"{part.path} holds {twice} for a second time: fetch the parts again"
            )
        tensors |= part.tensors
    return GgufFile(path, parts[0].fields, tensors, pages)


def _part(path: Path, pages: Pages) -> GgufFile:
    sizes = _sizes()
    try:
        if path.stat().st_size < 4:
            raise Damaged(f"it has {path.stat().st_size} bytes")
        data = pages.open(path)
        header = _Header(data.numpy())
        fields = header.start()
        return GgufFile(path, fields, header.tensors(fields, data, sizes), pages)
    except Damaged as error:
        raise CaptureError(f"{path} is not a whole GGUF file: {error}; fetch it again") from None
    except OSError as error:
        raise CaptureError(f"{path} cannot be read: {error}") from error


@cache
def _sizes() -> Mapping[int, tuple[str, int, int]]:
    """ggml's types by number: name, elements of a block, bytes of a block."""
    with extra("gguf"):
        from gguf.constants import GGML_QUANT_SIZES
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


_LENGTH = struct.Struct("<Q")  # of a text


class _Header:
    """Reads on from the beginning of a file; every count is held against the bytes that are left."""

    def __init__(self, data: Any):
        """`data`: the bytes of the file, as a buffer."""
        self._data = memoryview(data)
        self._at = 0
        self._count = 0

    def start(self) -> dict[str, Any]:
        """The metadata."""
        magic = bytes(self._take(4))
        if magic != _MAGIC:
            raise Damaged(
                f"it begins with the bytes {magic.hex(' ')}, not {_MAGIC.hex(' ')} (GGUF)"
            )
        version = self._number("I")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise Damaged("its numbers are big-endian, and accel reads little-endian ones")
            raise Damaged(f"it has version {version} of the format, and accel reads 2 and 3")
        self._count, fields = self._number("Q"), dict[str, Any]()
        for _ in range(self._number("Q")):
            key = self._text()
            if key in fields:
                raise Damaged(f"its metadata has {plain(key)} twice")
            fields[key] = self._value(self._number("I"))
        return fields

    def tensors(
        self, fields: Mapping[str, Any], data: Tensor, sizes: Mapping[int, tuple[str, int, int]]
    ) -> dict[str, GgufTensor]:
        """The tensors, which the file lists behind the metadata. `sizes`: ggml's types."""
        listed = [self._entry() for _ in range(self._checked(self._count, 24))]
        align = fields.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise Damaged(f"general.alignment is {shown(align)}, not a power of two")
        begin = end = -(-self._at // align) * align
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in listed:
            label = plain(name)
            if name in found:
                raise Damaged(f"it has the tensor {label} twice")
            if kind not in sizes:
                raise Damaged(
                    f"{label} is of ggml's type {kind}, which this package gguf does not know"
                )
            word, block, size = sizes[kind]
            if not shape or 0 in shape:
                raise Damaged(f"{label} is {list(shape)}, which holds nothing")
            if shape[-1] % block:
                raise Damaged(f"{label} is {list(shape)}, which blocks of {block} do not divide")
            start, length = begin + offset, prod(shape) // block * size
            behind = -(-end // align) * align  # each lies behind the one before it
            if start != behind:
                raise Damaged(
                    f"{label} begins at byte {start}, and by the tensors before it at byte {behind}"
                )
            end = start + length
            if end > len(data):
                raise Damaged(f"it ends at byte {len(data)}, and {label} at byte {end}")
            found[name] = GgufTensor(word, shape, data[start:end])
        if found and len(data) - end >= align:
            raise Damaged(f"its last tensor ends at byte {end}, and it at byte {len(data)}")
        return found

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._text(), self._checked(self._number("I"), 8)
        if axes > _AXES:
            raise Damaged(f"{plain(name)} has {axes} axes, and tensors have {_AXES} at most")
        shape = [self._number("Q") for _ in range(axes)]
        return name, tuple(reversed(shape)), self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise Damaged(
                f"its metadata has a value of type {kind}, which the format does not have"
            )
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._texts(self._sane(count, 8, "a list"))
        if kind not in _NUMBERS:
            raise Damaged(f"its metadata has an array of type {kind}, which accel does not read")
        dtype = np.dtype(_NUMBERS[kind])
        part = self._take(self._sane(count, dtype.itemsize, "a list") * dtype.itemsize)
        return np.frombuffer(part, dtype.newbyteorder("<")).tolist()

    def _texts(self, count: int) -> list[str]:
        """As `_text` reads them; vocabularies have hundreds of thousands."""
        found, data, end = list[str](), self._data, len(self._data)
        for _ in range(count):
            begin = self._at + 8
            size = _LENGTH.unpack_from(data, self._at)[0] if begin <= end else end
            if size > min(_LONGEST, end - begin):
                found.append(self._text())  # it tells what is wrong
                continue
            try:
                found.append(str(data[begin : begin + size], "utf-8"))
            except UnicodeDecodeError:
                found.append(self._text())
            self._at = begin + size
        return found

    def _text(self) -> str:
        count = self._sane(self._number("Q"), 1, "a text")
        try:
            return str(self._take(count), "utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"a text in its metadata is not UTF-8 ({error.reason})") from None

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _take(self, count: int) -> memoryview:
        self._checked(count, 1)
        self._at += count
        return self._data[self._at - count : self._at]

    def _sane(self, count: int, least: int, what: str) -> int:
        """A count of parts of the metadata, which become Python's objects."""
        if self._checked(count, least) > _LONGEST:
            raise Damaged(f"its metadata has {what} of {count}, and accel reads {_LONGEST} at most")
        return count

    def _checked(self, count: int, least: int) -> int:
        """A count of things that take so many bytes at least."""
        left = len(self._data) - self._at
        if count * least > left:
            raise Damaged(
                f"at byte {self._at} it tells of {count * least} bytes or more, and {left} are left"
            )
        return count
