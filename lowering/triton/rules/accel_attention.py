"""Attention: the tiles and splits of `kernels/attend.py`, and the slots that a tile need look at."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops import attention, flat, kv, mass
from accel.ir.ops.attention import Mask, Operands, own_visible
from accel.lowering.triton.kernels.attend import attend
from accel.lowering.triton.kernels.draw import draw
from accel.lowering.triton.kernels.merge import merge
from accel.lowering.triton.rules.accel_codec import Code, stored
from accel.lowering.triton.writer import chip
from accel.lowering.triton.writer.builder import Builder
from accel.lowering.triton.writer.sizes import power, rows
from accel.lowering.triton.writer.table import lower
from accel.lowering.triton.writer.tuned import Choice, Tuned

_LEAST = 16  # rows and channels that tl.dot takes at least
_WIDEST, _USUAL = 1024, 256  # channels of a head, at most: a tile has to fit on the chip
_ON_CHIP = 1 << 14  # bytes of float32 keys of one block, about

_attend = Tuned(
    attend,
    ("MASK", "BLOCK_M", "BLOCK_N", "D", "DV", "K_KIND", "K_BITS", "V_KIND", "PAGE", "CHOSEN", "heads", "groups"),
    near=("rows", "tiles", "listed"),
)  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How the queries of a group are cut. heads: of the group, in each of `parts`; block: slots read at once."""

    heads: int
    parts: int
    tokens: int
    block: int

    @classmethod
    def of(cls, device: torch.device, repeat: int, tokens: int, width: int) -> Tiling:
        """For `repeat` query heads per KV head, so many tokens, and heads of so many channels."""
        wide = max(_LEAST, power(width))
        most = chip.rows(device) if wide <= 256 else _LEAST
        heads = min(repeat, most)
        block = min(64, max(_LEAST, _ON_CHIP // (4 * wide)))
        return cls(heads, -(-repeat // heads), min(tokens, most // heads), block)

    @property
    def rows(self) -> int:
        """Rows of a tile, a power of two."""
        return max(_LEAST, power(self.heads * self.tokens))


def survey(
    q_pos: Tensor,
    k_pos: Tensor,
    mask: str,
    window: int,
    repeat: int,
    width: int,
    tokens: int | None = None,
    tree: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The blocks of slots that each tile of queries may see: [B,tiles,n] int32, those that count
    first, and how many they are [B,tiles]. The same for all layers of a mask class. `tokens`: of a row, as far as
    tiles go by them. What of the call's own keys a tile sees, a tree says: all of theirs count.
    """
    tiling = Tiling.of(q_pos.device, repeat, q_pos.shape[1] if tokens is None else tokens, width)
    seen = Mask(mask, window).visible(q_pos.unsqueeze(2), k_pos.unsqueeze(1))  # [B,T,S]
    if tree is not None and first is not None and tree.shape[2] > 1:
        seen = seen | own_visible(tree, first, k_pos.shape[1])[0]
    tokens, slots = seen.shape[1:]
    count = -(-slots // tiling.block)
    pad = (0, count * tiling.block - slots, 0, -tokens % tiling.tokens)
    seen = torch.nn.functional.pad(seen, pad).unflatten(1, (-1, tiling.tokens))
    alive = seen.unflatten(3, (count, tiling.block)).any(4).any(2)  # [B,tiles,n]
    place = torch.where(alive, alive.cumsum(2) - 1, count)
    numbers = torch.arange(count, device=alive.device, dtype=torch.int32).expand_as(alive)
    found = numbers.new_zeros(*alive.shape[:2], count + 1).scatter_(2, place, numbers)
    return found[:, :, :count].contiguous(), alive.sum(2, dtype=torch.int32)


def survey_flat(
    owner: Tensor, q_pos: Tensor, k_pos: Tensor, mask: str, window: int, repeat: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the tokens of all rows in one, q_pos [1,F], of which owner [F,2] says whose they are; and where those
    of each row begin and end among them [B+1].
    """
    row, number = owner.unbind(1)
    padded = q_pos.new_full((k_pos.shape[0], int(number.max()) + 1), -1)
    padded[row, number] = q_pos[0]
    counts = row.new_zeros(k_pos.shape[0]).index_add_(0, row, torch.ones_like(row))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    most = chip.rows(q_pos.device)
    return *survey(padded, k_pos, mask, window, repeat, width, most), starts


@dataclass(frozen=True)
class Part:
    """Slots that attention reads. scales: of keys and values in codes [B,G,S]; lists: what `survey` found. counts:
    [B,G], heads have unequal numbers of slots, one head's after another's: [B,1,S,…]. table [B,M]: slots lie in the
    pages of a pool, k [Z,G,E,D], and scales [Z,G,E]; -1: none. codes: how keys and values are stored. chosen [B,G,T,K]:
    each query reads stretches of `page` slots alone, none twice; -1: none.
    """

    k: Tensor
    v: Tensor
    pos: Tensor  # [B,S], or [B,G,S], or [B,1,S]
    scales: tuple[Tensor | None, Tensor | None] | None = None
    lists: tuple[Tensor, Tensor] | None = None
    counts: Tensor | None = None
    table: Tensor | None = None
    codes: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    chosen: Tensor | None = None
    page: int = 0

    @property
    def key_code(self) -> Code:
        """How keys are stored."""
        return Code(*self.codes[0])

    @property
    def value_code(self) -> Code:
        """How values are stored."""
        return Code(*self.codes[1])

    @property
    def wide(self) -> int:
        """Channels of a value."""
        return self.value_code.width or self.v.shape[3]

    @property
    def slots(self) -> int:
        """Slots that a query of a head may read; where these are unequal numbers, the mean."""
        if self.chosen is not None:
            return self.chosen.shape[3] * self.page
        every: int = self.k.shape[2] * self.key_code.rows
        every *= 1 if self.table is None else self.table.shape[1]
        return every if self.counts is None else -(-every // self.counts.shape[1])


@dataclass(frozen=True)
class Form:
    """What attention does with the scores, as the operator says it."""

    scale: float
    softcap: float
    mask: str
    window: int
    bias: Tensor | None = None
    sink: Tensor | None = None
    tree: Tensor | None = None  # over the last part's own keys
    first: Tensor | None = None
    starts: Tensor | None = None  # of rows whose queries are one row; then the last part has lists


def attention_over(
    q: Tensor, q_pos: Tensor, parts: list[Part], form: Form, partial: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + mask) v over the slots of all parts: [B,H,T,Dv], by token in memory; and where it is
    `partial`, the log-sum-exp [B,H,T].

    A row that sees nothing gets 0, and the lowest finite number.
    """
    batch, heads, tokens, width = q.shape
    own = parts[-1]
    groups, wide = own.k.shape[1], own.wide
    parts = [p for p in parts if p.slots]
    out = q.new_empty(batch, tokens, heads, wide)
    lse = q.new_empty((batch, tokens, heads if partial else 0), dtype=torch.float32)
    if not parts or not q.numel():
        lse.fill_(torch.finfo(torch.float32).min)
        if form.sink is not None and partial:
            lse.copy_(form.sink.expand_as(lse))
        return out.zero_().transpose(1, 2), lse.transpose(1, 2)
    lines = batch * tokens * heads
    tiling = Tiling.of(q.device, heads // groups, 1 if own.chosen is not None else tokens, width)
    tiles = -(-tokens // tiling.tokens)
    if form.starts is not None and own.lists is not None:
        batch, most = own.k.shape[0], chip.rows(q.device)
        tiling = Tiling.of(q.device, heads // groups, most, width)
        tiles = own.lists[0].shape[1]
    programs = tiles * batch * groups * tiling.parts
    splits = [chip.splits(q.device, programs, -(-p.slots // tiling.block)) for p in parts]
    every, offset = sum(splits), 0
    split = q.new_empty(0 if every == 1 else lines * every * wide, dtype=torch.float32)
    sums = q.new_empty(0 if every == 1 else 2 * lines * every, dtype=torch.float32)
    candidates = _candidates(q.device, tiling, width, every, len(parts) == 1)
    for part, count in zip(parts, splits, strict=True):
        last = part is own
        given = (
            q,
            q_pos,
            part,
            form,
            tiling,
            tiles,
            out,
            lse,
            split,
            sums,
            offset,
            count if len(parts) > 1 else None,
            candidates,
            last,
        )
        every = _launch(*given)
        offset += count
    if every > 1:
        merge[(lines,)](
            split, sums, _or(form.sink, out), out, lse, lines, every, heads,
            SINK=form.sink is not None, LSE=partial, DV=wide, BLOCK_S=power(every),
            BLOCK_V=power(wide), num_warps=1 if wide * every <= 1024 else 4,
        )  # fmt: skip
    return out.transpose(1, 2), lse.transpose(1, 2)


def _launch(
    q: Tensor,
    q_pos: Tensor,
    part: Part,
    form: Form,
    tiling: Tiling,
    tiles: int,
    out: Tensor,
    lse: Tensor,
    partial: Tensor,
    sums: Tensor,
    offset: int,
    count: int | None,
    candidates: Sequence[Choice],
    last: bool,
) -> int:
    """One part's `count` splits (None: all there are), from split `offset` on. Gives how many there are in all."""
    heads, tokens, width = q.shape[1:]
    lines = q.shape[0] * tokens * heads
    q, pos = rows(q), rows(part.pos)
    key, value = part.key_code, part.value_code
    k, k_strides = key.laid(part.k)
    v, v_strides = value.laid(part.v)
    batch = k.shape[0] if part.table is None else part.table.shape[0]
    groups, slots, wide = k.shape[1], k.shape[2] * key.rows, part.wide
    pages = 0 if part.table is None else part.table.shape[1]
    ends = None if part.counts is None else part.counts.cumsum(1)
    if ends is not None:
        groups = ends.shape[1]
        k_strides, v_strides = (k_strides[0], 0, k_strides[2]), (v_strides[0], 0, v_strides[2])
    per_head = pos.dim() == 3 and pos.shape[1] > 1
    lists = part.lists or (out, out)
    k_scale, v_scale = part.scales or (None, None)
    page = slots if pages else 0
    slots *= pages or 1
    listed = part.slots if part.chosen is not None else slots
    tree = form.tree is not None and form.tree.shape[2] > 1 and last
    bias = "" if form.bias is None else "distance" if form.bias.dim() == 2 else "positions"
    middle = form.bias.shape[1] // 2 if form.bias is not None and form.mask == "full" else 0
    programs = batch * groups * tiling.parts
    chosen = _attend(
        lambda x: (tiles, x["splits"] if count is None else count, programs), candidates,
        q, k, v, _or(k_scale, out), _or(v_scale, out), _or(key.more, out), _or(value.more, out),
        _or(key.least, out), _or(value.least, out), _or(key.finer, out), _or(value.finer, out),
        _flag((key, value), q), q_pos.contiguous(), pos,
        _or(form.bias, out), _or(form.sink, out),
        form.tree.contiguous().view(torch.uint8) if tree and form.tree is not None else out,
        form.first if tree else out, _or(ends, out), _or(form.starts, out), _or(part.table, out),
        _or(part.chosen, out), *lists,
        out, lse, partial, sums,
        form.scale, form.softcap or 1.0, form.window, tokens, slots, heads, groups,
        lines, 0 if form.bias is None else form.bias.shape[-1], middle,
        pages, 0 if part.chosen is None else part.chosen.shape[3], -(-listed // tiling.block), offset,
        *q.stride()[:3], *k_strides, *v_strides,
        pos.stride(0), pos.stride(1) if per_head else 0, 0, tiles,
        MASK=form.mask, BIAS=bias, CAPPED=bool(form.softcap), SINK=form.sink is not None, TREE=tree,
        RAGGED=ends is not None, PAGE=page, FLAT=form.starts is not None, LSE=lse.numel() > 0,
        CHOSEN=part.page if part.chosen is not None else 0, LISTED=part.lists is not None,
        D=width, DV=wide, K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
        **key.constants("K"), **value.constants("V"),
        HEADS=tiling.heads, TOKENS=tiling.tokens, PARTS=tiling.parts, BLOCK_M=tiling.rows,
        BLOCK_N=tiling.block, BLOCK_D=max(_LEAST, power(width)), BLOCK_V=max(_LEAST, power(wide)),
        PRECISION=chip.precision(q.device),
    )  # fmt: skip
    return int(chosen["splits"])


def _candidates(
    device: torch.device, tiling: Tiling, width: int, splits: int, alone: bool
) -> list[Choice]:
    """Launches of a part with so many splits in all, or a fourth where it is `alone`: as estimated, with other warps,
    and with one block on its way at once.
    """
    stages = _stages(device, tiling, width)
    ways = [(4, stages), (2 if tiling.rows == _LEAST else 8, stages)]
    ways += [(4, 1)] if stages > 1 else []
    counts = splits, -(-splits // 4) if alone else splits
    return [Choice({"splits": n, "WHOLE": n == 1}, *way) for n in counts for way in ways]


def _stages(device: torch.device, tiling: Tiling, width: int) -> int:
    """How many blocks are on their way at once."""
    small = tiling.rows == _LEAST or width <= 64 or chip.shared(device) >= chip.LARGE
    return 2 if small and width <= _USUAL else 1


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor to point at, where there is none."""
    return other if tensor is None else tensor.contiguous()


def _flag(codes: Sequence[Code], like: Tensor) -> Tensor:
    """Whether finer codes are left out, a bool [] as the kernel reads it; anything where there are none."""
    asked = [code.coarse for code in codes if code.coarse is not None]
    if asked:
        return asked[0].reshape(1).view(torch.uint8)
    finer = any(code.finer is not None for code in codes)
    return like.new_zeros(1, dtype=torch.uint8) if finer else like


def _widest(device: str) -> int:
    """Channels of the widest head that the kernel takes."""
    return _WIDEST if chip.shared(torch.device(device)) >= chip.LARGE else _USUAL


def attended(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[tuple[Any, ...]],
    bias: Tensor | None,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    sink: Tensor | None,
    tree: Tensor | None,
    first: Tensor | None,
    beside: Tensor | None = None,
    beside_lse: Tensor | None = None,
    pages: Tensor | None = None,
    page: int = 0,
) -> Tensor:
    """`attention`; each of `parts` is what a Part is made of."""
    form = Form(scale, softcap, mask, window, bias, sink, tree, first)
    read = _read(parts, pages, page)
    out, lse = attention_over(q, q_pos, read, form, beside is not None)
    if beside is None or beside_lse is None:
        return out
    return attention.merged(out, lse, beside, beside_lse)[0].to(out.dtype)


def _read(parts: Sequence[tuple[Any, ...]], pages: Tensor | None, page: int) -> list[Part]:
    """The parts; of the last one only the pages that each query asks for, where it says any."""
    read = [Part(*part) for part in parts]
    if pages is not None and pages.shape[2]:
        once = pages.sort(dim=3).values
        twice = torch.nn.functional.pad(once[..., 1:] == once[..., :-1], (1, 0))
        read[-1] = replace(read[-1], lists=None, chosen=once.masked_fill(twice, -1), page=page)
    return read


def flatly(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[tuple[Any, ...]],
    starts: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    sink: Tensor | None,
) -> Tensor:
    """`flat_attention`, over rows whose tokens begin at `starts`."""
    form = Form(scale, softcap, mask, window, bias, sink, starts=starts)
    return attention_over(q, q_pos, [Part(*part) for part in parts], form)[0]


def partly(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[tuple[Any, ...]],
    bias: Tensor | None,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    sink: Tensor | None,
    tree: Tensor | None,
    first: Tensor | None,
    beside: Tensor | None = None,
    beside_lse: Tensor | None = None,
    pages: Tensor | None = None,
    page: int = 0,
) -> tuple[Tensor, Tensor]:
    """`partial_attention`, in the same way."""
    form = Form(scale, softcap, mask, window, bias, sink, tree, first)
    out, lse = attention_over(q, q_pos, _read(parts, pages, page), form, True)
    if beside is not None and beside_lse is not None:
        found, lse = attention.merged(out, lse, beside, beside_lse)
        out = found.to(out.dtype)
    return out, lse


@lower(attention.attention.default)
def attention_rule(b: Builder, *operands: Any, **more: Any) -> Any:
    return _attention_rule(b, attended, operands, more)


@lower(attention.partial_attention.default)
def partial_rule(b: Builder, *operands: Any, **more: Any) -> Any:
    return _attention_rule(b, partly, operands, more)


def _attention_rule(
    b: Builder, run: Callable[..., Any], operands: tuple[Any, ...], more: dict[str, Any]
) -> Any:
    """Heads that are too wide for the chip go by the reference. What was kept is few slots, most of which
    are seen, so only the recent ones are surveyed.
    """
    x = Operands[fx.Node](*operands, **more)
    width, wide = int(b.shape(x.q)[3]), int(b.shape(x.v)[3])
    if max(width, wide) > _widest(b.device):
        return NotImplemented
    repeat = int(b.shape(x.q)[1]) // int(b.shape(x.k)[1])
    seen = x.q_pos, x.k_pos, x.mask, x.window
    lists = b.once(survey, *seen, repeat, width, None, x.tree, x.first)
    k, v, scales, codes = stored(x.k, x.v)
    parts = [(k, v, x.k_pos, scales, lists, None, None, codes)]
    if x.kept_k is not None and x.kept_v is not None:
        parts.insert(0, _kept(x))
    return b.call(
        run,
        x.q,
        x.q_pos,
        parts,
        x.bias,
        x.scale,
        x.softcap,
        x.mask,
        x.window,
        x.sink,
        x.tree,
        x.first,
        x.beside,
        x.beside_lse,
        x.pages,
        x.page,
    )


@lower(flat.flat_attention.default)
def flat_rule(b: Builder, *operands: Any, **more: Any) -> Any:
    """Queries are read as they lie, too."""
    x = flat.Flat[fx.Node](*operands, **more)
    width, wide = int(b.shape(x.q)[3]), int(b.shape(x.v)[3])
    if max(width, wide) > _widest(b.device):
        return NotImplemented
    repeat = int(b.shape(x.q)[1]) // int(b.shape(x.k)[1])
    found = b.once(survey_flat, x.owner, x.q_pos, x.k_pos, x.mask, x.window, repeat, width)
    blocks, counts, starts = (b.once(operator.getitem, found, i) for i in range(3))
    k, v, scales, codes = stored(x.k, x.v)
    parts = [(k, v, x.k_pos, scales, (blocks, counts), None, None, codes)]
    if x.kept_k is not None and x.kept_v is not None:
        parts.insert(0, _kept(x))
    return b.call(
        flatly, x.q, x.q_pos, parts, starts, x.bias, x.scale, x.softcap, x.mask, x.window, x.sink
    )


def _kept(x: Any) -> tuple[Any, ...]:
    """What a Part of kept slots is made of; those that a pool's pages hold are read where they lie."""
    k, v, scales, codes = stored(x.kept_k, x.kept_v)
    nodes = [k, v, *(scale for scale in scales or () if scale is not None)]
    if any(node.target is not kv.gather_blocks.default for node in nodes):
        return k, v, x.kept_pos, scales, None, x.kept_counts, None, codes
    pools: dict[Any, Any] = {node: node.args[0] for node in nodes} | {None: None}
    held = None if scales is None else tuple(pools[scale] for scale in scales)
    return pools[k], pools[v], x.kept_pos, held, None, None, k.args[1], codes


def drawn(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[tuple[Any, ...]],
    bias: Tensor | None,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    sink: Tensor | None,
    tree: Tensor | None,
    first: Tensor | None,
    share: Tensor,
) -> Tensor:
    """`drawn_attention` without a matrix of probabilities: the log-sum-exp of each query, then each slot's sums."""
    form = Form(scale, softcap, mask, window, bias, sink, tree, first)
    read = [Part(*part) for part in parts]
    blind = [replace(p, codes=(p.codes[0], ("none", _LEAST))) for p in read]
    lse = attention_over(q, q_pos, blind, form, True)[1].transpose(1, 2)  # [B,T,H], together
    batch, heads, tokens, width = q.shape
    groups, q = read[-1].k.shape[1], rows(q)
    tiling = Tiling.of(q.device, heads // groups, tokens, width)
    out = q.new_empty(batch, groups, sum(p.slots for p in read), dtype=torch.float32)
    share = (share * (q_pos >= 0)).to(torch.float32).contiguous()
    offset = 0
    for part in read:
        key, pos, own = part.key_code, rows(part.pos), part is read[-1]
        k, strides = key.laid(part.k)
        kind = "" if bias is None else "distance" if bias.dim() == 2 else "positions"
        grown = tree is not None and tree.shape[2] > 1 and own
        if part.slots and q.numel():
            k_scale = (part.scales or (None,))[0]
            draw[(-(-part.slots // tiling.block), batch * groups)](
                q, k, _or(k_scale, out), _or(key.more, out), _or(key.least, out), _or(key.finer, out),
                _flag((key,), q), q_pos.contiguous(), pos, _or(bias, out),
                tree.contiguous().view(torch.uint8) if grown and tree is not None else out, first if grown else out,
                lse, share, out, scale, softcap or 1.0, window, tokens, part.slots, heads, groups,
                0 if bias is None else bias.shape[-1], bias.shape[1] // 2 if bias is not None and mask == "full" else 0,
                offset, out.shape[2], *q.stride()[:3], *strides,
                pos.stride(0), pos.stride(1) if pos.dim() == 3 and pos.shape[1] > 1 else 0,
                MASK=mask, BIAS=kind, CAPPED=bool(softcap), TREE=grown, D=width, K_SCALED=k_scale is not None,
                **key.constants("K"), HEADS=tiling.heads, TOKENS=tiling.tokens, PARTS=tiling.parts,
                BLOCK_M=tiling.rows, BLOCK_N=tiling.block, BLOCK_D=max(_LEAST, power(width)),
                PRECISION=chip.precision(q.device), num_warps=4, num_stages=1,
            )  # fmt: skip
        offset += part.slots
    return out if q.numel() else out.zero_()


@lower(mass.drawn_attention.default)
def drawn_rule(b: Builder, *operands: Any, **more: Any) -> Any:
    """Neither with noise, nor of kept slots of unequal numbers, of pages, or of what is beside."""
    x = mass.Drawn[fx.Node](*operands, **more)
    none = x.temperature, x.kept_counts, x.pages, x.beside, x.beside_lse
    if int(b.shape(x.q)[3]) > _widest(b.device) or any(n is not None for n in none):
        return NotImplemented
    parts = []
    for k, v, pos in ((x.kept_k, x.kept_v, x.kept_pos), (x.k, x.v, x.k_pos)):
        if k is not None and v is not None:
            read = stored(k, v)
            parts.append((*read[:2], pos, read[2], None, None, None, read[3]))
    form = x.bias, x.scale, x.softcap, x.mask, x.window, x.sink, x.tree, x.first
    return b.call(drawn, x.q, x.q_pos, parts, *form, x.share)
