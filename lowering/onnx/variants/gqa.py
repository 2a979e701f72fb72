"""Attention over codes with scales that were there before as ONNX Runtime's own operator, which also writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from accel.ir.ops import attention, codec, kv
from accel.lowering import Table
from accel.lowering.onnx.rules.accel_codec import decode_static, encode_static
from accel.lowering.onnx.rules.accel_ops import attend as portable
from accel.lowering.onnx.rules.accel_ops import kv_append, position_mask
from accel.lowering.onnx.writer.branch import either
from accel.lowering.onnx.writer.builder import MICROSOFT, Builder, Call
from accel.passes.kv.codec._readers import HEAD

lower = Table("gqa")


@dataclass(frozen=True)
class Stored:
    """Codes that a step appends to."""

    written: str  # the value that the append gives
    buffer: str
    slots: str
    new: str  # what is appended, before it is encoded
    scale: str
    bits: int
    width: int
    write: fx.Node
    read: fx.Node

    @property
    def codes(self) -> Any:
        """An example of the slots."""
        return self.write.meta["val"]

    @property
    def groups(self) -> int:
        return int(self.codes.shape[1])


@lower(attention.attention.default)
def attend(b: Builder, *operands: Any, **more: Any) -> Any:
    """Calls of several tokens go the portable way."""
    x = attention.Operands[str](*operands, **more)
    found = stored(b, x)
    if found is None:
        return NotImplemented
    if reason := refusal(b, x, *found):
        b.refused[reason] = None
        return NotImplemented
    return of_one(b, x, found, position_mask(b, x), lambda x: portable(b, *_given(x)))


def of_one(
    b: Builder,
    x: attention.Operands[str],
    stored: tuple[Stored, Stored],
    hidden: str,
    otherwise: Callable[[attention.Operands[str]], Any],
) -> str:
    """A call of one token a row: GroupQueryAttention puts its codes into the slots, in place, and reads the slots up to
    the fullest row's, each under the mask that positions make. Of several tokens onnxruntime refuses several rows, and
    takes several times as long, so these go by `otherwise`, which gets what was appended to. hidden: the mask of that
    token (`position_mask`).
    """
    k, v = stored
    out, heads = b.out, int(b.shape(x.q)[1])
    last = b.cast(k.slots, torch.int32)
    most = b.node("ReduceMax", k.slots, keepdims=0)
    many = b.node("Add", most, b.constant(1, torch.int64))
    total, end = b.cast(many, torch.int32), b.vector(many)

    def single() -> tuple[str, ...]:
        asked = ((x.q, heads), (k.new, k.groups), (v.new, v.groups))
        rows = [b.node("Reshape", value, b.ints(0, 1, n * k.width)) for value, n in asked]
        bias = b.node("Slice", hidden, b.ints(0), end, b.ints(3))
        scales = [b.node("Reshape", s.scale, b.ints(-1)) for s in (k, v)]
        kind = "PER_TENSOR" if tuple(b.shape(k.scale)) == (1, 1) else "PER_CHANNEL"
        found, *codes = b.node(
            "GroupQueryAttention", *rows, k.buffer, v.buffer, last, total,
            None, None, None, bias, None, *scales, domain=MICROSOFT, outputs=3, num_heads=heads,
            kv_num_heads=k.groups, scale=float(x.scale), softcap=float(x.softcap), causal=0,
            k_quant_type=kind, v_quant_type=kind, kv_cache_bit_width=k.bits,
        )  # fmt: skip
        return b.node("Reshape", found, b.ints(0, heads, 1, k.width)), *codes

    made = _makers(b, [x.k, x.v], [k, v])

    def several() -> tuple[str, ...]:
        # anew: what is written outside of the branch every call would compute
        b.reused = {key: names for key, names in b.reused.items() if made.isdisjoint(names)}
        codes, numbers = zip(*(_appended(b, s) for s in (k, v)), strict=True)
        return otherwise(replace(x, k=numbers[0], v=numbers[1])), *codes

    alone = b.node("Equal", b.size(x.q_pos, 1), b.constant(1, torch.int64))
    made_of, *codes = either(b, alone, single, several, [out, k.codes, v.codes])
    b.instead |= dict(zip((k.written, v.written), codes, strict=True))
    return made_of


def refusal(b: Builder, x: attention.Operands[str], k: Stored, v: Stored) -> str:
    """Why GroupQueryAttention does not take it, or ""."""
    if k.width % HEAD or v.width != k.width:
        return (
            f"GroupQueryAttention takes keys and values of one width, a multiple of {HEAD}; here they have {k.width} "
            f"and {v.width} numbers"
        )
    beside = {
        "a sink": x.sink,
        "pages": x.pages,
        "kept slots": x.kept_k,
        "a partial result": x.beside,
    }
    if lacking := [name for name, value in beside.items() if value is not None]:
        return f"GroupQueryAttention does not take attention with {' and '.join(lacking)} here"
    return ""


def stored(b: Builder, x: attention.Operands[str]) -> tuple[Stored, Stored] | None:
    """Where keys and values are codes that the call appends to."""
    k, v = _stored(b, x.k), _stored(b, x.v)
    return None if k is None or v is None else (k, v)


def _stored(b: Builder, value: str) -> Stored | None:
    """What a value was decoded from, where only this attention reads it and what it was decoded from."""
    read = _call(b, value, codec.decode_static.default)
    write = _call(b, read.operands[0], kv.kv_append.default) if read is not None else None
    made = _call(b, write.operands[1], codec.encode_static.default) if write is not None else None
    if read is None or write is None or made is None:
        return None
    if any(len(_readers(call.node)) > 1 for call in (read, write, made)):
        return None
    _, scale, bits, width = read.operands
    buffer, _, slots = write.operands
    written, new = read.operands[0], made.operands[0]
    return Stored(written, buffer, slots, new, scale, bits, width, write.node, read.node)


def _call(b: Builder, value: str, op: Any) -> Call | None:
    """The one call of that operator that gives a value."""
    found = b.lowered.get(value, [])
    return found[0] if len(found) == 1 and found[0].node.target is op else None


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _appended(b: Builder, stored: Stored) -> tuple[str, str]:
    """The codes with those of what is new, and the numbers that they are read as."""
    codes = encode_static(b, stored.new, stored.scale, stored.bits)
    whole = kv_append(b, stored.buffer, codes, stored.slots)
    b.meta[whole] = stored.codes
    numbers = decode_static(b, whole, stored.scale, stored.bits, stored.width)
    b.meta[numbers] = stored.read.meta["val"]
    b.lowered[numbers] = [Call(stored.read, (whole, stored.scale, stored.bits, stored.width))]
    return whole, numbers


def _makers(b: Builder, values: Sequence[str], stored: Sequence[Stored]) -> set[str]:
    """The values that lead from what is stored and what is new to `values`."""
    made = {o: n for n in b.nodes for o in n.output}
    ends = {name for s in stored for name in (s.buffer, s.slots, s.new)}
    todo, found = list(values), set[str]()
    while todo:
        value = todo.pop()
        if value in made and value not in found | ends:
            found.update(made[value].output)
            todo += made[value].input
    return found


def _given(x: attention.Operands[str]) -> tuple[Any, ...]:
    """In the order of the schema."""
    return tuple(getattr(x, name) for name in x.__dataclass_fields__)
