"""accel's own compiled operators: keys, values and weights of few bits are read once, at the memory's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch

from accel.ir.ops import attention, choice, codec, flat, groups, kv, mass, pages, quantized, units
from accel.lowering import Table
from accel.lowering.onnx.native import DOMAIN, library
from accel.lowering.onnx.native.join import DRAWN, join
from accel.lowering.onnx.native.stored import Stored, stored_of
from accel.lowering.onnx.rules.accel_codec import decode_rows as decoded
from accel.lowering.onnx.rules.accel_ops import position_mask
from accel.lowering.onnx.rules.accel_pages import kv_pages as portable_pages
from accel.lowering.onnx.variants import NATIVE, gqa
from accel.lowering.onnx.writer.builder import Builder, Call, Param

lower = Table(NATIVE, batch_invariant=True, missing=lambda: library()[1], join=join)
aten = torch.ops.aten
_AXES = 4  # that native/abi.h reads
_PAGE = 16  # slots that native/attention.cc reads together
# what decodes slots -> its operands that have slots
_BY_SLOT: dict[Any, tuple[int, ...]] = {
    codec.decode_rows.default: (0, 1),
    codec.decode_halves.default: (0,),
    codec.look_up_rows.default: (0, 2),
    groups.group_dequantize.default: (0, 1, 2, 8),
}
_MASKS = ("causal", "window", "chunk", "full")  # their numbers in native/slots.h


@lower(attention.attention.default)
def attend(b: Builder, *operands: Any, **more: Any) -> Any:
    """Every form has one, small pages beside a bias or a tree aside; `exact` keeps a row's bits the same however many
    rows a call has. Codes are read as they lie.
    """
    x = attention.Operands[str](*operands, **more)
    if not b.batch_invariant and (stored := gqa.stored(b, x)) is not None:
        alone = b.shape(x.q)[1] == stored[0].groups  # a query head has keys of its own
        if (alone or stored[0].bits < 8) and not gqa.refusal(b, x, *stored):
            return gqa.of_one(b, x, stored, _last_mask(b, x), lambda x: _whole(b, x))
    return _whole(b, x)


def _last_mask(b: Builder, x: attention.Operands[str]) -> str:
    """What the last token may not see, since nothing else reads the mask of many."""
    if x.tree is not None:
        return position_mask(b, x)
    last = b.node("Slice", x.q_pos, b.ints(-1), b.ints((1 << 63) - 1), b.ints(1))
    return position_mask(b, replace(x, q_pos=last))


def _whole(b: Builder, x: attention.Operands[str]) -> Any:
    """Attention that is no partial result."""
    static = _static(b, x)
    if static is None:
        return _attend(b, x, partial=False)
    made = _attend(b, static[0], partial=False)
    return made if made is NotImplemented else b.node("Mul", made, static[1])


@lower(flat.flat_attention.default)
def attend_flat(b: Builder, *operands: Any, **more: Any) -> Any:
    """Of the tokens of all rows, as they lie."""
    return _whole(b, flat.Flat[str](*operands, **more))


@lower(attention.partial_attention.default)
def attend_partly(b: Builder, *operands: Any, **more: Any) -> Any:
    return _attend(b, attention.Operands[str](*operands, **more), partial=True)


@lower(mass.drawn_attention.default)
def drawn_attention(b: Builder, *operands: Any, **more: Any) -> Any:
    """The attention again, which `join` makes one with that of the layer. The portable rule reads blocks of codes, and
    bytes that stand for numbers of a table.
    """
    x = mass.Drawn[str](*operands, **more)
    if x.pages is not None or x.tree is not None:
        return NotImplemented
    blocks = (x.k, x.v, x.kept_k, x.kept_v)
    if any(name and stored_of(b, name) for name in blocks):
        return NotImplemented
    op, given, common = _plain(b, *_in_place(b, x), partial=False)
    if op not in DRAWN:
        return NotImplemented
    asked = [x.share, x.temperature, x.layer]
    outputs = b.node(
        DRAWN[op], *given, *asked, **common | {"outputs": 3}, noise=float(x.noise), seed=x.seed
    )
    return outputs[2]


def _attend(b: Builder, x: attention.Operands[str], partial: bool) -> Any:
    if x.pages is not None and (x.tree is not None or _apart(x)):
        return NotImplemented
    x, table = _in_place(b, x)
    new, old = (
        [stored_of(b, name) for name in names if name]
        for names in ((x.k, x.v), (x.kept_k, x.kept_v))
    )
    k_read, v_read = old or new
    if k_read and v_read and _alike(new, old):
        slots = [found for found in new if found] if all(new) else []
        return _over_blocks(b, x, table, k_read, v_read, slots, _common(b, x, partial))
    op, given, common = _plain(b, x, table, partial)
    return b.node(op, *given, **common)


def _in_place(b: Builder, x: attention.Operands[str]) -> tuple[attention.Operands[str], str | None]:
    """Where kept slots are gathered from the blocks of a pool: what all blocks hold [Z,G,E,..] in their place,
    positions [B,1,P], and the table [B,M] of the blocks that are a row's.
    """
    if x.kept_k is None or x.kept_v is None:
        return x, None
    k, v = (_of_pool(b, name) for name in (x.kept_k, x.kept_v))
    if k is None or v is None or k[1] != v[1]:
        return x, None
    return replace(x, kept_k=k[0], kept_v=v[0], kept_pos=_of_all(b, x.kept_pos)), k[1]


def _of_pool(b: Builder, value: str) -> tuple[str, str] | None:
    """A pool and the table by which a value was gathered; of codes that were gathered, what all of the pool stands for,
    which nobody computes.
    """
    for call in b.lowered.get(value, []):
        if call.node.target is kv.gather_blocks.default:
            pool, table = call.operands
            return pool, table
        if not (slots := _slots(call)):
            continue
        found = {i: _of_pool(b, call.operands[i]) for i in slots}
        pools = {i: one for i, one in found.items() if one is not None}
        tables = {table for _, table in pools.values()}
        if len(pools) < len(found) or len(tables) > 1:
            continue
        given = [pools[i][0] if i in pools else x for i, x in enumerate(call.operands)]
        made = lower.rules[call.node.target](b, *given)
        if made is not NotImplemented:
            b.meta[made] = call.node.meta["val"]
            b.lowered[made] = [Call(call.node, given)]
            return made, tables.pop()
    return None


def _slots(call: Call) -> list[int]:
    """The operands that hold what each slot is decoded from by itself, which may as well be gathered after; none where
    slots are decoded together.
    """
    places = _BY_SLOT.get(call.node.target, ())
    if call.node.target is groups.group_dequantize.default and call.operands[6] > 1:  # rows
        return []
    return [i for i in places if i < len(call.operands) and call.operands[i] is not None]


def _static(b: Builder, x: attention.Operands[str]) -> tuple[attention.Operands[str], str] | None:
    """Where all that is read are 8-bit codes with scales that were there before: the same over codes whose steps are 1,
    with queries that the keys' scales are in, and the values' scales, which what comes out is multiplied by.
    """
    names = {"k": x.k, "v": x.v, "kept_k": x.kept_k, "kept_v": x.kept_v}
    calls = {
        role: [c for c in b.lowered.get(name, []) if _is_static(c)]
        for role, name in names.items()
        if name is not None
    }
    if x.beside is not None or any(len(found) != 1 for found in calls.values()):
        return None
    heads, groups = int(b.shape(x.q)[1]), int(b.shape(x.k)[1])
    codes: dict[str, str] = {}
    for role, (call,) in calls.items():
        where = x.kept_pos if role.startswith("kept") and x.kept_pos is not None else x.k_pos
        count = b.size(where, b.rank(where) - 1)
        ones = b.node(
            "Expand",
            b.constant(1.0, torch.float32),
            b.concat_ints([b.size(where, 0), groups, count]),
        )
        codes[role] = decode_rows(b, call.operands[0], ones)
        b.meta[codes[role]] = call.node.meta["val"]
    k_steps, v_steps = (_steps(b, calls[role][0].operands[1], heads, groups) for role in "kv")
    q = b.node("Mul", x.q, k_steps)
    b.meta[q] = b.meta[x.q]
    kept = (codes.get("kept_k"), codes.get("kept_v"))
    return replace(x, q=q, k=codes["k"], v=codes["v"], kept_k=kept[0], kept_v=kept[1]), v_steps


def _steps(b: Builder, scale: str, heads: int, groups: int) -> str:
    """Scales [G,D] or [1,1] for the query heads: [1,H or 1,1,D or 1]."""
    found = b.node("Unsqueeze", scale, b.ints(0, 2))
    if heads == groups or int(b.shape(scale)[0]) == 1:
        return str(found)
    wide = b.node(
        "Expand", b.node("Unsqueeze", found, b.ints(2)), b.ints(1, 1, heads // groups, 1, 1)
    )
    return str(b.node("Reshape", wide, b.ints(1, heads, 1, -1)))


def _is_static(call: Call) -> bool:
    return call.node.target is codec.decode_static.default and call.operands[2] == 8


def _common(b: Builder, x: attention.Operands[str], partial: bool) -> dict[str, Any]:
    """The settings of every form."""
    return dict(
        domain=DOMAIN, scale=float(x.scale), softcap=float(x.softcap), mask=_MASKS.index(x.mask),
        window=x.window, exact=int(b.batch_invariant), packed=0, page=x.page,
        partial=int(partial), outputs=1 + partial,
    )  # fmt: skip


def _plain(
    b: Builder, x: attention.Operands[str], table: str | None, partial: bool
) -> tuple[str, list[str | None], dict[str, Any]]:
    """Operator, operands and settings of attention over floats, or over int8 codes or halves where all are."""
    held = [name for name in (x.k, x.v, x.kept_k, x.kept_v) if name]
    codes = {name: found for name in held if (found := _codes(b, name))}
    coded = len(codes) == len(set(held))
    looked = {name: made for name in held if (made := _made(b, name, "LookUp"))}
    if len(looked) == len(set(held)):
        return "AttentionTable", _looked_up(x, table, looked), _common(b, x, partial)
    halves = {name: made.input[0] for name in held if (made := _made(b, name, "DecodeFloat16"))}
    if len(halves) == len(set(held)):
        k, v, kept_k, kept_v = (
            halves.get(n) if n else None for n in (x.k, x.v, x.kept_k, x.kept_v)
        )
        new = [x.q, k, v, x.q_pos, x.k_pos, x.bias, x.sink]
        read = [*new, kept_k, kept_v, x.kept_pos, x.pages, *_last(x, table)]
        return "AttentionFloat16", read, _common(b, x, partial)
    given = (x.q, x.k, x.v, x.q_pos, x.k_pos, x.bias, x.sink, x.kept_k, x.kept_v)
    read = [codes[name][0] if coded and name in codes else name for name in given]
    scales: list[str | None] = [codes[n][1] for n in held if coded]
    none = [None] * (4 - len(scales) if coded else 0)
    rest = [*none, *_last(x, table)]
    op = "AttentionInt8" if coded else "Attention"
    return op, [*read, x.kept_pos, x.pages, *scales, *rest], _common(b, x, partial)


def _looked_up(
    x: attention.Operands[str], table: str | None, made: dict[str, onnx.NodeProto]
) -> list[str | None]:
    """Operands of attention over bytes that stand for numbers of tables."""
    parts = {name: [*node.input, None][:3] for name, node in made.items()}
    places = (x.k, x.v, x.kept_k, x.kept_v)
    codes, tables, scales = (
        [(parts[n][i] or None) if n else None for n in places] for i in range(3)
    )
    q, given = [x.q, *codes[:2]], [x.q_pos, x.k_pos, x.bias, x.sink, *codes[2:]]
    return [*q, *given, x.kept_pos, x.pages, *scales, *tables, *_last(x, table)]


def _last(x: attention.Operands[str], table: str | None) -> list[str | None]:
    """The operands that come last, whatever form keys and values have. table: of the blocks that were kept."""
    owner = x.owner if isinstance(x, flat.Flat) else None
    return [x.tree, x.first, x.beside, x.beside_lse, x.kept_counts, owner, table]


def _apart(x: attention.Operands[str]) -> bool:
    """Whether nothing reads pages of this size: small ones, slot by slot, without a bias; larger ones by kNear."""
    return x.bias is not None if x.page < _PAGE else x.page % _PAGE != 0


def _alike(new: list[Stored | None], old: list[Stored | None]) -> bool:
    """Whether one operator reads these codes: blocks of as many rows, before slots of floats; or slots, each a block,
    before others of the same kind.
    """
    last, first = ([found.codes for found in all_of if found] for all_of in (new, old))
    if {kind.rows for kind in last} > {1} or (last and len(last) < len(new)):
        return False
    if last and not all(found and found.plain for found in (*new, *old)):
        return False
    alike = [kind.kind for kind in first] == [kind.kind for kind in last]
    return len({kind.rows for kind in first}) < 2 and (not first or not last or alike)


def _over_blocks(
    b: Builder,
    x: attention.Operands[str],
    table: str | None,
    k: Stored,
    v: Stored,
    new: list[Stored],
    common: dict[str, Any],
) -> Any:
    """Attention that reads blocks of codes before slots of floats; or where what is `new` is in codes, too, slots of
    them, each a block.
    """
    settings = common | dict(
        k_bits=k.codes.bits, v_bits=v.codes.bits, rows=k.codes.rows, k_group=k.codes.group, v_group=v.codes.group,
        k_along=k.codes.along, v_along=v.codes.along, v_width=v.codes.width, k_down=k.down, v_down=v.down,
    )  # fmt: skip
    kept = [k, v] if x.kept_k else []
    k_now, v_now = (found.codes.codes for found in new) if new else (x.k, x.v)
    scales = [part for found in (*new, *kept) for part in (found.codes.scale, found.codes.least)]
    k_kept, v_kept = (found.codes.codes for found in kept) if kept else (None, None)
    ends = (x.q_pos, x.k_pos, x.bias, x.sink)
    given = [x.q, k_now, v_now, *ends, k_kept, v_kept, _of_all(b, x.kept_pos), x.pages, *scales]
    given += [None] * (4 - 4 * bool(kept)) if new else []
    if new:
        return b.node("AttentionCodes", *given, *_last(x, table), **settings)
    beside = [part for found in (k, v) for part in found.extra_operands]
    return b.node("AttentionGroups", *given, *_last(x, table), *beside, k.coarse, **settings)


def _of_all(b: Builder, positions: str | None) -> str | None:
    """Positions [B,1,P], where each head has the same."""
    made = next((n for n in reversed(b.nodes) if positions in n.output), None)
    same = made is not None and made.op_type == "Expand" and b.shape(made.input[0])[1] == 1
    return made.input[0] if made is not None and same else positions


def _made(b: Builder, value: str, op: str) -> onnx.NodeProto | None:
    """accel's operator of that name that makes a value."""
    around = b.above[0] if b.above else []  # the graph that a branch is in
    made = next((n for n in reversed([*around, *b.nodes]) if value in n.output), None)
    return made if made is not None and (made.op_type, made.domain) == (op, DOMAIN) else None


def _codes(b: Builder, value: str) -> list[str]:
    """The codes and scales that a value was decoded from, where it was."""
    made = _made(b, value, "Decode")
    return [] if made is None else list(made.input)


def _as_stored(b: Builder, value: str) -> list[str]:
    """What a value was decoded from: codes and scales, or halves; else itself."""
    halves = _made(b, value, "DecodeFloat16")
    return [halves.input[0]] if halves is not None else _codes(b, value) or [value]


@lower(choice.page_range.default)
def page_range(
    b: Builder, high: str, low: str, keys: str, q_pos: str, slots: str, page: int
) -> Any:
    """Only the pages that a call wrote to, in place."""
    read, *scales = _as_stored(b, keys)
    operands = (high, low, read, q_pos, slots, *scales)
    return b.node(
        "PageRangeInt8" if scales else "PageRange", *operands, domain=DOMAIN, outputs=2, page=page
    )


@lower(pages.fetch_pages.default)
def fetch_pages(b: Builder, listed: str, buffer: str, page: int) -> Any:
    """Of numbers as they are, and of int8 codes."""
    if b.dtype(buffer) != torch.float32 or _made(b, buffer, "DecodeGroups"):
        return NotImplemented
    held, *scales = _as_stored(b, buffer)
    op = "FetchPagesInt8" if scales else "FetchPages"
    return b.node(op, listed, held, domain=DOMAIN, page=page)


@lower(choice.page_bounds.default)
def page_bounds(b: Builder, q: str, high: str, low: str) -> Any:
    return b.node("PageBounds", q, high, low, domain=DOMAIN)


@lower(choice.best_pages.default)
def best_pages(
    b: Builder,
    worth: str,
    q_pos: str,
    k_pos: str,
    slots: str,
    count: int,
    page: int,
    mask: str,
    window: int,
) -> Any:
    return b.node(
        "BestPages", worth, q_pos, k_pos, slots, domain=DOMAIN, count=count, page=page,
        mask=_MASKS.index(mask), window=window,
    )  # fmt: skip


@lower(choice.key_products.default)
def key_products(
    b: Builder,
    q: str,
    keys: str,
    at: str | None = None,
    cos: str | None = None,
    sin: str | None = None,
    interleaved: bool = False,
) -> Any:
    """Keys are turned as they are read; codes are read as they lie."""
    if any(b.dtype(x) != torch.float32 for x in (q, keys)):
        return NotImplemented
    read, *scales = _as_stored(b, keys)
    op = "KeyProductsInt8" if scales else "KeyProducts"
    return b.node(op, q, read, at, cos, sin, *scales, domain=DOMAIN, interleaved=int(interleaved))


@lower(choice.head_votes.default)
def head_votes(b: Builder, scores: str, seen: str, steps: float) -> Any:
    return b.node("HeadVotes", scores, seen, domain=DOMAIN, steps=float(steps))


@lower(units.best_tokens.default)
def best_tokens(b: Builder, worth: str, label: str, seen: str, count: int) -> Any:
    return b.node("BestTokens", worth, label, seen, domain=DOMAIN, count=count)


@lower(units.units_seen.default)
def units_seen(b: Builder, label: str, seen: str, count: Any) -> Any:
    return b.node("UnitsSeen", label, seen, b.operand(count, torch.int64), domain=DOMAIN)


@lower(pages.kv_pages.default)
def kv_pages(b: Builder, buffer: str, first: str, count: Any, page: int) -> Any:
    """Of codes, only those of the pages are decoded."""
    if halves := _made(b, buffer, "DecodeFloat16"):
        return decode_halves(b, portable_pages(b, halves.input[0], first, count, page))
    codes = _codes(b, buffer)
    if not codes:
        return NotImplemented
    return decoded(b, *(portable_pages(b, part, first, count, page) for part in codes))


@lower(codec.encode_rows.default)
def encode_rows(b: Builder, x: str) -> Any:
    return b.node("Encode", x, domain=DOMAIN, outputs=2)


@lower(codec.decode_rows.default)
def decode_rows(b: Builder, q: str, scale: str) -> Any:
    """Only for who needs the numbers: attention reads the codes."""
    return b.node("Decode", q, scale, domain=DOMAIN)


@lower(codec.encode_halves.default)
def encode_halves(b: Builder, x: str) -> Any:
    return b.node("EncodeFloat16", x, domain=DOMAIN)


@lower(codec.decode_halves.default)
def decode_halves(b: Builder, q: str) -> Any:
    """Only for who needs the numbers, as above."""
    return b.node("DecodeFloat16", q, domain=DOMAIN)


@lower(codec.look_up_rows.default)
def look_up_rows(b: Builder, q: str, table: str, scale: str | None = None) -> Any:
    """Only for who needs the numbers, as above."""
    return (
        b.node("LookUp", q, table, scale, domain=DOMAIN) if b.rank(q) <= _AXES else NotImplemented
    )


@lower(aten.index_select.default)
def index_select(b: Builder, x: str, dim: int, index: str) -> Any:
    return _columns(b, x, dim % b.rank(x), index)


@lower(aten.index.Tensor)
def index_tensor(b: Builder, x: str, indices: Sequence[str | None]) -> Any:
    (*before, last) = indices
    if last is None or any(before):
        return NotImplemented
    return _columns(b, x, len(before), last)


def _columns(b: Builder, x: str, axis: int, index: str) -> Any:
    """The same numbers of each row; onnxruntime's Gather copies them one by one."""
    kinds = b.dtype(x) == torch.float32 and b.dtype(index) == torch.int64
    if not kinds or not 1 < b.rank(x) <= _AXES or axis != b.rank(x) - 1 or b.rank(index) != 1:
        return NotImplemented
    return b.node("Columns", x, index, domain=DOMAIN)


@lower(groups.group_dequantize.default)
def group_dequantize(
    b: Builder,
    codes: str,
    scale: str,
    least: str,
    bits: int,
    group: int,
    along: str,
    rows: int,
    width: int,
    finer: str | None = None,
) -> Any:
    """Only for who needs the numbers: attention reads the codes."""
    if b.rank(codes) != 4:
        return NotImplemented
    return b.node(
        "DecodeGroups", codes, scale, least, finer, domain=DOMAIN, bits=bits, group=group,
        along=int(along == "rows"), rows=rows, width=width,
    )  # fmt: skip


@lower(quantized.quantized_linear.default)
def quantized_linear(
    b: Builder,
    x: str,
    q: str,
    scales: str,
    zeros: str | None,
    bias: str | None,
    bits: int,
    block: int,
) -> Any:
    """The weights as they lie in the file, scales in two levels too: onnxruntime keeps no copy of its own."""
    if b.dtype(x) != torch.float32 or (zeros is not None and bits > 4):
        return NotImplemented
    scales, *fine = (b.parts(scales) if isinstance(scales, Param) else ()) or (scales,)
    operands = (x, q, scales, zeros, bias, None, None, None, *fine)
    return b.node(
        "Linear", *operands, domain=DOMAIN, bits=bits, block=block, gate=0, epsilon=0.0,
        exact=int(b.batch_invariant),
    )  # fmt: skip
