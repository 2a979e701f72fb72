"""Mutants of a GGUF file: each is its bytes with one thing of the header changed, or with its end missing."""

import struct
from copy import deepcopy
from dataclasses import dataclass

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
STRING, ARRAY = 8, 9
F32, F16, Q4_0, Q8_0, I8, I32, BF16, NONE = 0, 1, 2, 8, 24, 26, 30, 77
INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)


@dataclass
class Parts:
    """fields: [key, kind, value], of arrays the value is (kind, list); tensors: [name, dims, kind, offset], dims as the
    file has them.
    """

    fields: list
    tensors: list
    data: bytes
    align: int = 32
    version: int = 3
    magic: bytes = b"GGUF"
    counts: tuple = (0, 0)  # added to those of tensors and fields

    def bytes(self):
        out = bytearray(self.magic)
        more, pairs = self.counts
        out += struct.pack("<IQQ", self.version, len(self.tensors) + more, len(self.fields) + pairs)
        for key, kind, value in self.fields:
            out += _text(key) + struct.pack("<I", kind) + _value(kind, value)
        for name, dims, kind, offset in self.tensors:
            out += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return bytes(out + bytes(-len(out) % self.align)) + self.data


def _text(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind, value):
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_value(of, one) for one in items)
    if kind in INTEGERS:
        value = int(value) % 256 ** struct.calcsize(NUMBERS[kind])
        return value.to_bytes(struct.calcsize(NUMBERS[kind]), "little")
    return struct.pack(f"<{NUMBERS[kind]}", value)


def parts(data):
    """Of the bytes of a right file."""
    at = 0

    def take(form):
        nonlocal at
        found = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return found[0] if len(found) == 1 else found

    def text():
        nonlocal at
        count = take("Q")
        at += count
        return data[at - count : at].decode()

    def value(kind):
        if kind == STRING:
            return text()
        if kind == ARRAY:
            of, count = take("I"), take("Q")
            return of, [value(of) for _ in range(count)]
        return take(NUMBERS[kind])

    take("I")
    _, many, pairs = take("I"), take("Q"), take("Q")
    fields = []
    for _ in range(pairs):
        key = text()
        kind = take("I")
        fields.append([key, kind, value(kind)])
    tensors = []
    for _ in range(many):
        name, axes = text(), take("I")
        dims = [take("Q") for _ in range(axes)]
        tensors.append([name, dims, take("I"), take("Q")])
    align = next((v for k, _, v in fields if k == "general.alignment"), 32)
    return Parts(fields, tensors, data[-(-at // align) * align :], align)


def mutants(whole):
    """(what is changed, whose name an error tells or "", a function that gives the bytes), of the parts of a file."""

    def changed(change):
        def made():
            copy = deepcopy(whole)
            change(copy)
            return copy.bytes()

        return made

    def setting(which, at, index, value):
        def change(copy):
            getattr(copy, which)[at][index] = value

        return changed(change)

    yield "magic", "", changed(lambda p: setattr(p, "magic", b"GGUG"))
    for version in (0, 1, 4, 3 << 16):
        yield f"version {version}", "", changed(lambda p, v=version: setattr(p, "version", v))
    for counts in ((1, 0), (-1, 0), (2**40, 0), (0, 1), (0, -1), (0, 2**40)):
        yield f"counts {counts}", "", changed(lambda p, c=counts: setattr(p, "counts", c))
    data = whole.bytes()
    for share in range(40):
        cut = len(data) * share // 40
        yield f"the first {cut} bytes", "", lambda cut=cut: data[:cut]
    yield "bytes behind", "", lambda: data + bytes(64)
    for align in (0, 3, 8, 16, 64, 4096, 2**31):
        more = ["general.alignment", 4, align]
        yield f"alignment {align}", "", changed(lambda p, m=more: p.fields.append(m))
    for i in range(len(whole.tensors)):
        yield from _of_tensor(whole, i, setting, changed)
    for i in range(len(whole.fields)):
        yield from _of_field(whole, i, setting, changed)


def _of_tensor(whole, i, setting, changed):
    name, dims, kind, offset = whole.tensors[i]
    other = (i + 1) % len(whole.tensors)
    size = whole.tensors[other][3] - offset
    for value in (offset + 1, offset + 32, offset - 32, offset + size, 0, 2**63):
        if value != offset:
            yield f"{name} at {value}", "", setting("tensors", i, 3, value % 2**64)
    for value in (F32, F16, Q4_0, Q8_0, I8, I32, BF16, NONE):
        if value != kind and {value, kind} != {F16, BF16}:  # of one size
            yield f"{name} of type {value}", "", setting("tensors", i, 2, value)
    shapes = [
        dims[::-1],
        [2 * dims[0], *dims[1:]],
        [dims[0] // 2, *dims[1:]],
        [*dims, 1],
        [1, *dims],
        [0, *dims[1:]],
    ]
    shapes += [
        dims[:-1],
        [*dims[:-1], 2**60],
        [*dims, 1, 1, 1, 1],
        [dims[0] // 2, *[2 * d for d in dims[1:]]],
    ]
    for shape in shapes:
        if shape != dims:
            yield f"{name} as {shape}", "", setting("tensors", i, 1, shape)
    for text in (
        whole.tensors[other][0],
        f"{name}x",
        "",
        "blk.0",
        "blk.0.weight",
        "blk.99.attn_q.weight",
        b"\xff",
    ):
        yield f"{name} named {text!r}", "", setting("tensors", i, 0, text)
    for text in ("attn_q.bias", "attn_output.bias", "ffn_up.bias"):
        one = [f"blk.0.{text}", [dims[0]], F32, len(whole.data)]

        def more(copy, one=one):
            copy.tensors.append(one)
            copy.data += bytes(4 * one[1][0])

        if one[0] != name and i == 0:
            yield f"{one[0]} besides", ".0.", changed(more)

    def swap(copy):
        copy.tensors[i], copy.tensors[other] = copy.tensors[other], copy.tensors[i]

    yield f"{name} behind the next", "", changed(swap)

    def drop(copy):
        """A right file, but for what it lacks."""
        _, _, _, start = copy.tensors.pop(i)
        size = (copy.tensors[i][3] if i < len(copy.tensors) else len(copy.data)) - start
        copy.data = copy.data[:start] + copy.data[start + size :]
        for one in copy.tensors[i:]:
            one[3] -= size

    if name != "output.weight":  # without which the embedding is the head
        yield f"{name} missing", "", changed(drop)


def _of_field(whole, i, setting, changed):
    key, kind, value = whole.fields[i]

    def replaced(form, what):
        def change(copy):
            copy.fields[i] = [key, form, what]

        return changed(change)

    yield f"{key} missing", "", changed(lambda p: p.fields.pop(i))
    yield f"{key} twice", key, changed(lambda p: p.fields.append(p.fields[i]))
    yield f"{key} renamed", "", setting("fields", i, 0, f"{key}x")
    others = [
        (STRING, "llama"),
        (STRING, b"\xff"),
        (ARRAY, (4, [1, 2])),
        (ARRAY, (STRING, ["a"])),
        (ARRAY, (4, [])),
    ]
    others += [
        (7, 1),
        (6, 2.0),
        (6, float("nan")),
        (6, float("inf")),
        (6, -1.0),
        (6, 0.0),
        (12, 1e300),
    ]
    others += [(4, n) for n in (0, 1, 3, 5, 2**31 - 1, 2**32 - 1)] + [(11, -1), (10, 2**64 - 1)]
    for form, what in others:
        if (form, what) != (kind, value):
            yield f"{key} = {what!r}", "", replaced(form, what)
    if kind == ARRAY:
        of, items = value
        for what in (items[:-1], items[: len(items) // 2], [*items, items[-1]], items[::-1]):
            yield f"{key} of {len(what)}", "", replaced(ARRAY, (of, what))
