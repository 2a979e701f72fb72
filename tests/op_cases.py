"""Operands for every operator of the dialect, at several sizes: what `test_ops.py` runs over."""

import importlib
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import accel.ir.ops as dialect
from accel.ir.ops import (
    centres,
    choice,
    codec,
    experts,
    flat,
    groups,
    kv,
    norm,
    pages,
    patched,
    quantized,
    recurrence,
    rope,
    rows,
    units,
)
from accel.ir.ops.op import Op

from .attention_cases import attention_cases, owners
from .op_case import LONGEST, SIZES, TRACE, Case, constant, key_positions, query_positions, randn

__all__ = [
    "CASES", "LONGEST", "SIZES", "TRACE", "Case", "constant", "key_positions", "operators", "query_positions",
    "randn",
]  # fmt: skip


def operators() -> dict[str, Op]:
    """Every `Op` that a file of ir/ops defines."""
    found = {}
    for info in pkgutil.iter_modules(dialect.__path__):
        module = importlib.import_module(f"{dialect.__name__}.{info.name}")
        found |= {v.name: v for v in vars(module).values() if isinstance(v, Op)}
    return found


def tables(rotated: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(LONGEST)[:, None] * 7.0 ** -(torch.arange(0, rotated, 2) / rotated)
    return angle.cos(), angle.sin()


def turn(rotated: int, interleaved: bool) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        cos, sin = tables(rotated)
        return [randn(rng, b, 3, t, 10), query_positions(rng, b, t, LONGEST), cos, sin, interleaved]

    return make


def append(*inner: int) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        slots = torch.from_numpy(rng.integers(0, max(1, c - t + 1), b))
        if not inner:
            return [torch.full((b, c), -1), query_positions(rng, b, t, c), slots]
        g, *d = inner
        return [randn(rng, b, g, c, *d), randn(rng, b, g, t, *d), slots]

    return make


def append_flat(*inner: int) -> Callable[..., list[Any]]:
    """As many tokens as t, of b rows."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        owner = owners(b, t, rng)
        buffer, new, _ = append(*inner)(b, t, c, rng)
        slots = torch.from_numpy(rng.integers(0, max(1, c - int(owner[:, 1].max())), b))
        return [buffer, new[:1].contiguous(), slots, owner]

    return make


def pooled(*inner: int) -> Callable[..., list[Any]]:
    """A pool of c blocks of three slots; some blocks of a table are none."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        return [randn(rng, c, 2, 3, *inner), torch.from_numpy(rng.integers(-1, c, (b, t)))]

    return make


def paged(*inner: int) -> Callable[..., list[Any]]:
    """Pages of one slot, since there may be any number of slots."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        return [randn(rng, b, 2, c, *inner), torch.from_numpy(rng.integers(0, c, b)), 1, 1]

    return make


def fetched(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    listed = torch.from_numpy(rng.integers(-1, c, (b, 2, t, 3)))
    return [listed, randn(rng, b, 2, c, 6), 1]


def ranged(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    high, low, keys = (randn(rng, b, 2, c, 6) for _ in range(3))
    return [
        high,
        low,
        keys,
        query_positions(rng, b, t, c),
        torch.from_numpy(rng.integers(0, c - t + 1, b)),
        1,
    ]


BEST = [(2, "causal"), (5, "window"), (9, "chunk"), (3, "full")]


def worthy(count: int, mask: str) -> Callable[..., list[Any]]:
    """Whole numbers, of which many are equal, some none, some infinite."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        worth = randn(rng, b, 2, t, c).round()
        for number in (float("nan"), float("inf"), -float("inf")):
            worth[torch.from_numpy(rng.random(worth.shape) < 0.1)] = number
        where = query_positions(rng, b, t, c), key_positions(rng, b, c)
        slots = torch.from_numpy(rng.integers(0, c - t + 1, b))
        return [worth, *where, slots, count, 1, mask, 4]

    return make


def grouped(count: int) -> Callable[..., list[Any]]:
    """Four units, of equal and broken worth, each slot in one of them."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        worth = randn(rng, b, 2, t, 4).round()
        worth[torch.from_numpy(rng.random(worth.shape) < 0.1)] = float("nan")
        label = torch.from_numpy(rng.integers(-1, 4, (b, 2, c)))
        return [worth, label, torch.from_numpy(rng.random((b, 1, t, c)) < 0.7), count]

    return make


def keyed(rotated: int, interleaved: bool) -> Callable[..., list[Any]]:
    """Queries and keys, a channel of which is no number; with tables, positions up to theirs."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        q, keys = randn(rng, b, 2, t, 10), randn(rng, b, 2, c, 10)
        keys[-1, 1, -1, 3] = torch.nan
        if not rotated:
            return [q, keys]
        return [q, keys, key_positions(rng, b, c), *tables(rotated), interleaved]

    return make


def voted(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    """Scores of three heads, one of which is sure, one of which has what is no number; a token that sees nothing."""
    scores, seen = randn(rng, b, 3, t, c), torch.from_numpy(rng.random((b, 1, t, c)) < 0.7)
    scores[:, 1] *= 5000
    scores[-1, 2, 0, -1] = torch.nan
    seen[0, 0, -1] = False
    return [scores, seen, 1024.0]


def labelled(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    label = torch.from_numpy(rng.integers(-1, 8, (b, 2, c)))
    return [label, torch.from_numpy(rng.random((b, 1, t, c)) < 0.3), 7]


def scattered(count: int, some: bool) -> Callable[..., list[Any]]:
    """Keys of few numbers, a third of the slots empty, one key that is no number; with some centres before."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        x, nearest = randn(rng, b, 2, c, 5), torch.full((b, 2, c), torch.inf)
        real = torch.from_numpy(rng.random((b, 2, c)) < 0.7)
        if c > 4:
            x[0, 0, 3, 2] = torch.nan
        if some:
            nearest = randn(rng, b, 2, c).square()
        return [x, real, nearest, torch.tensor(count)]

    return make


def block_table(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    return [torch.from_numpy(rng.integers(-1, 9, (b, t))), 2, 3]


def coded_rows(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    """A row of zeros, one with a huge number, one of the smallest that there are."""
    x = randn(rng, b, 2, t, 10)
    x[0, 0, 0], x[0, 1, 0], x[-1, 1, -1, 3] = 0, 1e-44, 1e37
    return [x]


def halved(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    """Of all sizes, what is too large for float16 and too small, midway between two halves, and no number."""
    x = randn(rng, b, 2, t, 21) * 10.0 ** torch.from_numpy(rng.integers(-8, 6, (b, 2, t, 1)))
    x[0, 0, 0, :9] = torch.tensor(
        [65504, 65519.9, 65520, -1e30, 2**-25, 3 * 2**-25, 1 + 2**-11, 1e-44, -0.0]
    )
    x[-1, 1, -1, 3:6] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return [x]


def decoded_rows(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    q = torch.from_numpy(rng.integers(-127, 128, (b, 2, c, 10), np.int8))
    return [q, randn(rng, b, 2, c).abs()]


def looked_up_rows(scaled: bool) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        codes = torch.from_numpy(rng.integers(0, 200, (b, 2, c, 10), np.uint8))
        scale = [randn(rng, b, 2, c).abs()] if scaled else []
        return [codes, randn(rng, 200), *scale]

    return make


def static_steps(channels: bool, width: int) -> Tensor:
    steps = constant(2, width).abs() / 20 + 0.01
    return steps if channels else steps[:1, :1]


def static_numbers(bits: int, channels: bool, width: int) -> Callable[..., list[Any]]:
    """In and beyond the range, half steps of every code, infinities and what is no number."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        scale = static_steps(channels, width)
        x = randn(rng, b, 2, t, width) * 4
        x[..., :2] = (torch.from_numpy(rng.integers(-150, 150, (b, 2, t, 2))) + 0.5) / 16
        x[0, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
        return [x, scale, bits]

    return make


def static_codes(bits: int, channels: bool, width: int) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        kind, sizes = (np.int8, (width,)) if bits == 8 else (np.uint8, ((width + 1) // 2,))
        ends = np.iinfo(kind)
        codes = rng.integers(ends.min, ends.max + 1, (b, 2, c, *sizes)).astype(kind)
        return [torch.from_numpy(codes), static_steps(channels, width), bits, width]

    return make


def unpacked_blocks(width: int, *how: Any) -> Callable[..., list[Any]]:
    """Blocks of 8 rows: one constant, one with NaN, one of large and small numbers."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        x = randn(rng, b, 2, c, 8, width)
        x[0, 0, 0], x[-1, 1, -1, 3, 0] = 3.3, float("nan")
        x[0, 1, 0] *= torch.tensor([1e-6, 1e-3, 1, 0, 10, 1e3, -1e4, 1])[:, None]
        return [x, *how]

    return make


def packed_blocks(width: int, bits: int, group: int, along: str) -> Callable[..., list[Any]]:
    """At the smallest there are none."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        parts = groups.group_quantize(randn(rng, b, 2, c, 8, width), bits, group, along)
        return [*(p[:, :, : c if c > 1 else 0] for p in parts), bits, group, along, 8, width]

    return make


def with_finer(*how: Any) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        operands = packed_blocks(*how)(b, t, c, rng)
        return [*operands, torch.from_numpy(rng.integers(0, 256, operands[0].shape, np.uint8))]

    return make


def several(c: int, rows: int) -> int:
    """Blocks of so many rows: of single ones c, but none at the smallest."""
    return 3 if rows > 1 else c if c > 1 else 0


def product(rows: int) -> Callable[..., list[Any]]:
    """In rank 2."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        count = several(c, rows)
        x, a, right = (
            randn(rng, b, 2, *n) for n in ((rows * count, 7), (count, 2 * rows), (count, 14))
        )
        return [x, a.half(), right.half(), rows]

    return make


def placed(rows: int, along: str) -> Callable[..., list[Any]]:
    """Of each line one number for each two, in places of their own."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        count, (lines, size) = several(c, rows), ((7, rows) if along == "rows" else (rows, 7))
        each = -(-size // 2)
        places = np.argsort(rng.random((b, 2, count, lines, size)))[..., :each]
        places = torch.from_numpy(places.reshape(b, 2, count, lines * each)).byte()
        return [
            randn(rng, b, 2, rows * count, 7),
            randn(rng, *places.shape).half(),
            places,
            rows,
            along,
        ]

    return make


def few(width: int, stay: int) -> Callable[..., list[Any]]:
    """Blocks of 4 rows, of each of which so many numbers stay."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        count = c if c > 1 else 0
        rank = torch.from_numpy(rng.random((b, 2, count, 4, width))).argsort(-1).argsort(-1)
        mask = groups.packed((rank < stay).long(), 1).flatten(-2)
        return [randn(rng, b, 2, count, 4 * stay).half(), mask, 4, width]

    return make


GROUPS = [
    (10, 2, 4, "rows"),
    (10, 2, 4, "channels"),
    (7, 4, 8, "rows"),
    (9, 4, 16, "channels"),
    (12, 8, 2, "rows"),
]


def add_scale(eps: float, *bias: Tensor | None) -> Callable[..., list[Any]]:
    def make(b, t, c, rng):
        return [randn(rng, b, t, 36), randn(rng, b, t, 36), constant(36), *bias, eps]

    return make


def scale(eps: float, *shape: int) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        return [randn(rng, b, *shape[:-1], t, shape[-1]), constant(shape[-1]), eps]

    return make


def gated(act: str) -> Callable[..., list[Any]]:
    return lambda b, t, c, rng: [randn(rng, b, t, 9) * 3, randn(rng, b, t, 9), act]


def take(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    return [randn(rng, b, t, 6), torch.from_numpy(rng.integers(0, t, (b, max(1, t - 1))))]


def routed(transposed: bool) -> Callable[..., list[Any]]:
    """Four experts: fewer rows than experts at the smallest size, several rows each at the largest."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        weight = constant(4, 6, 5) if transposed else constant(4, 5, 6)
        ids = torch.from_numpy(rng.integers(0, 4, t))
        return [randn(rng, t, 6), ids, weight, transposed]

    return make


def conv(taps: int, biased: bool) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        bias = constant(6) if biased else None
        state = randn(rng, b, taps - 1, 6)
        return [randn(rng, b, t, 6), constant(6, taps), bias, state, query_positions(rng, b, t, c)]

    return make


def scan(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    x, step = randn(rng, b, t, 7), randn(rng, b, t, 7).abs()
    inner = [randn(rng, b, t, 3) for _ in "bc"]
    a = -constant(3, 7).abs()
    return [x, step, a, *inner, randn(rng, b, 3, 7), query_positions(rng, b, t, c)]


def plain_scan(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    x, step = randn(rng, b, t, 7), randn(rng, b, t, 7).abs()
    return [
        x,
        step,
        -constant(1, 7).abs(),
        None,
        None,
        randn(rng, b, 1, 7),
        query_positions(rng, b, t, c),
    ]


def climb(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    x, decay = 3 * randn(rng, b, t, 4), -randn(rng, b, t, 4).abs()
    return [x, decay, 3 * randn(rng, b, 4), query_positions(rng, b, t, c)]


def weighted_mean(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    """Keys so large that exp overflows; every other row of the state is empty."""
    state = torch.stack((randn(rng, b, 5), randn(rng, b, 5).abs() + 1, 90 * randn(rng, b, 5)), 1)
    state[::2] = 0
    k, v = 90 * randn(rng, b, t, 5), randn(rng, b, t, 5)
    return [k, v, -constant(5).abs(), constant(5), state, query_positions(rng, b, t, c)]


def remember(q: int, k: int, delta: bool, channels: bool = False) -> Callable[..., list[Any]]:
    """Six heads of size 4 over 5; q and k have fewer. A decay by head, or by channel of k."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        beta = torch.sigmoid(randn(rng, b, t, 6))
        decay = -(randn(rng, b, t, 6, 4) if channels else randn(rng, b, t, 6)).abs()
        queries, keys = randn(rng, b, t, q, 4), F.normalize(randn(rng, b, t, k, 4), dim=-1)
        return [
            queries, keys, randn(rng, b, t, 6, 5), decay, beta if delta else None,
            randn(rng, b, 6, 4, 5), query_positions(rng, b, t, c),
        ]  # fmt: skip

    return make


def rewrite(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    """Six heads of size 4 over 5; what is written anew is not what was asked for."""
    erase = F.normalize(randn(rng, b, t, 6, 4), dim=-1)
    write = -erase * torch.sigmoid(randn(rng, b, t, 6, 4))
    return [
        randn(rng, b, t, 6, 4), randn(rng, b, t, 6, 4), randn(rng, b, t, 6, 5), -randn(rng, b, t, 6, 4).abs(),
        erase, write, randn(rng, b, 6, 4, 5), query_positions(rng, b, t, c),
    ]  # fmt: skip


def blocks(bits: int, width: int, block: int, zeros: bool, seed: int = 0) -> list[Any]:
    """Random codes of 9 rows of `width` numbers: q, scales, zeros."""
    rng, count = np.random.default_rng(seed), -(-width // block)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (9, count, block), np.uint8))
    points = torch.from_numpy(rng.integers(0, 2**bits, (9, count), np.uint8))
    scales = torch.from_numpy((rng.random((9, count), np.float32) + 0.1) / 50)
    offsets = quantized.pack(points, quantized.zero_bits(bits)) if zeros else None
    return [quantized.pack_blocks(codes, bits), scales, offsets]


def stored(bits: int, width: int, block: int, zeros: bool) -> list[Any]:
    """The same, with scales as builds store them where blocks are of 128, else as older artifacts have them."""
    q, scales, offsets = blocks(bits, width, block, zeros)
    return [q, scales.bfloat16() if block == 128 else scales, offsets]


def few_bits(
    bits: int, width: int, block: int, zeros: bool, bias: bool
) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        x = randn(rng, b, t, width) * torch.from_numpy(rng.random((b, t, 1), np.float32))
        x[0, 0, : min(block, width)] = 0  # a block that holds nothing
        offset = constant(9) if bias else None
        return [x, *stored(bits, width, block, zeros), offset, bits, block]

    return make


def few_bits_rows(bits: int, width: int, block: int, zeros: bool) -> Callable[..., list[Any]]:
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        ids = torch.from_numpy(rng.integers(0, 9, (b, t)))
        return [ids, *stored(bits, width, block, zeros), bits, block, width]

    return make


def few_bits_routed(bits: int, width: int, block: int, zeros: bool) -> Callable[..., list[Any]]:
    """Five experts of 9 rows; some chosen by no row, one by several."""
    made = [blocks(bits, width, block, zeros, seed) for seed in range(5)]
    weights = [None if c[0] is None else torch.stack(c) for c in zip(*made, strict=True)]

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        ids = torch.from_numpy(rng.integers(0, 5, t))
        return [randn(rng, t, width), ids, *weights, bits, block]

    return make


def quantized_cases() -> list[Case]:
    sizes = [
        (b, k, n, z)
        for b in (2, 3, 4, 5, 6, 8)
        for k, n in ((64, 32), (70, 16), (128, 128))
        for z in (False, True)
        if b not in (5, 6) or not z  # which have no zero points in ONNX
    ]
    of_experts = [one for one in sizes if one[0] in (4, 8)]
    return [
        *(
            Case(
                f"quantized_linear-{b}-{k}-{n}{'-zeros' if z else ''}",
                quantized.quantized_linear,
                few_bits(b, k, n, z, k == 70),
                (1, 2, 3, 4),
            )
            for b, k, n, z in sizes
        ),
        *(
            Case(
                f"quantized_embedding-{b}-{k}-{n}{'-zeros' if z else ''}",
                quantized.quantized_embedding,
                few_bits_rows(b, k, n, z),
                (1, 2, 3),
            )
            for b, k, n, z in sizes
        ),
        *(
            Case(
                f"quantized_expert_linear-{b}-{k}-{n}{'-zeros' if z else ''}",
                quantized.quantized_expert_linear,
                few_bits_routed(b, k, n, z),
                (2, 3, 4),
            )
            for b, k, n, z in of_experts
        ),
    ]


def recurrence_cases() -> list[Case]:
    heads = [(6, 6), (2, 2), (1, 1), (6, 2)]
    return [
        Case("conv-4", recurrence.causal_conv, conv(4, True), (1, 2)),
        Case("conv-2", recurrence.causal_conv, conv(2, False), (1,)),
        Case("scan", recurrence.selective_scan, scan, (2,)),
        Case("scan-plain", recurrence.selective_scan, plain_scan, (2,)),
        Case("peak", recurrence.running_peak, climb),
        Case("dplr", recurrence.dplr_attention, rewrite),
        Case("wkv", recurrence.wkv, weighted_mean, (2, 3)),
        *(
            Case(
                f"{'delta' if d else 'linear'}-{q}-{k}",
                recurrence.linear_attention,
                remember(q, k, d),
            )
            for (q, k), d in itertools.product(heads, (False, True))
        ),
        *(
            Case(
                f"{'delta' if d else 'linear'}-channels",
                recurrence.linear_attention,
                remember(6, 6, d, True),
            )
            for d in (False, True)
        ),
    ]


def cases() -> list[Case]:
    return [
        *attention_cases(),
        *recurrence_cases(),
        *quantized_cases(),
        *(
            Case(f"rope-{r}-{'pairs' if i else 'halves'}", rope.rope, turn(r, i), (2, 3))
            for r, i in itertools.product((10, 4), (False, True))
        ),
        Case("kv_append-heads", kv.kv_append, append(2, 6)),
        Case("kv_append-scales", kv.kv_append, append(2)),
        Case("flat_append-heads", flat.flat_append, append_flat(2, 6)),
        Case("flat_append-scales", flat.flat_append, append_flat(2)),
        Case("flat_append-positions", flat.flat_append, append_flat()),
        Case("gather_blocks-heads", kv.gather_blocks, pooled(6)),
        Case("gather_blocks-scales", kv.gather_blocks, pooled()),
        Case("block_positions", kv.block_positions, block_table),
        Case("encode_rows", codec.encode_rows, coded_rows),
        Case("decode_rows", codec.decode_rows, decoded_rows),
        Case("encode_halves", codec.encode_halves, halved),
        Case("decode_halves", codec.decode_halves, lambda *args: [halved(*args)[0].clamp(-7e4, 7e4).half()]),
        *(
            Case(f"look_up_rows-{s}", codec.look_up_rows, looked_up_rows(s))
            for s in (False, True)
        ),
        *(
            Case(f"{what}_static-{n}-{'channels' if c else 'whole'}-{w}", op, make(n, c, w), (1,))
            for n, c, w in ((8, False, 10), (8, True, 7), (4, False, 7), (4, True, 10))
            for what, op, make in (
                ("encode", codec.encode_static, static_numbers),
                ("decode", codec.decode_static, static_codes),
            )
        ),
        *(
            Case(f"group_{what}-{how[1]}-{how[3]}", op, make(*how))
            for how in GROUPS
            for what, op, make in (
                ("quantize", groups.group_quantize, unpacked_blocks),
                ("dequantize", groups.group_dequantize, packed_blocks),
            )
        ),
        *(
            Case(f"group_dequantize-{how[1]}-{how[3]}-finer", groups.group_dequantize, with_finer(*how))
            for how in GROUPS
        ),
        *(Case(f"add_product-{n}", patched.add_product, product(n)) for n in (1, 4)),
        *(
            Case(f"put_numbers-{n}-{a}", patched.put_numbers, placed(n, a))
            for n in (1, 4)
            for a in ("rows", "channels")
        ),
        *(Case(f"spread_rows-{w}-{n}", patched.spread_rows, few(w, n)) for w, n in ((8, 3), (21, 21), (64, 20))),
        Case("kv_append-positions", kv.kv_append, append()),
        Case("rms_norm", norm.rms_norm, scale(1e-5, 36), (1,)),
        Case("rms_norm-heads", norm.rms_norm, scale(0.1, 3, 9), (1,)),
        Case("add_rms_norm", norm.add_rms_norm, add_scale(1e-5), (2,)),
        Case("add_layer_norm", norm.add_layer_norm, add_scale(0.1, constant(36)), (2, 3)),
        Case("add_layer_norm-plain", norm.add_layer_norm, add_scale(1e-5, None), (2,)),
        *(Case(f"gate-{act}", norm.gate, gated(act)) for act in norm.ACTIVATIONS),
        *(
            Case(
                f"lookup-{len(s)}",
                rows.lookup,
                lambda b, t, c, r, s=s: [constant(LONGEST, *s), query_positions(r, b, t, LONGEST)],
                (0,),
            )
            for s in ((), (7,), (2, 3))
        ),
        Case("take_rows", rows.take_rows, take),
        Case(
            "given_rows",
            rows.given_rows,
            lambda b, t, c, r: [randn(r, b, t, 6), randn(r, b, t, 6), randn(r, b, t) < 0],
        ),
        Case(
            "given_rows-none",
            rows.given_rows,
            lambda b, t, c, r: [randn(r, b, t, 6), randn(r, 1, 1, 6), randn(r, 1, 1) > 99],
        ),
        Case("kv_pages", pages.kv_pages, paged(6)),
        Case("kv_pages-scales", pages.kv_pages, paged()),
        Case(
            "few_to_many",
            pages.few_to_many,
            lambda b, t, c, r: [query_positions(r, b, t, c), key_positions(r, b, c), 4, 9],
        ),
        Case("fetch_pages", pages.fetch_pages, fetched),
        Case(
            "page_bounds",
            choice.page_bounds,
            lambda b, t, c, r: [randn(r, b, 3, t, 7), randn(r, b, 3, c, 7), randn(r, b, 3, c, 7)],
        ),
        Case("page_range", choice.page_range, ranged),
        *(Case(f"best_pages-{n}-{m}", choice.best_pages, worthy(n, m)) for n, m in BEST),
        *(
            Case(f"farthest_first-{n}-{some}", centres.farthest_first, scattered(n, some))
            for n, some in ((4, False), (30, False), (3, True), (0, True))
        ),
        *(Case(f"best_tokens-{n}", units.best_tokens, grouped(n)) for n in (3, 40)),
        Case("units_seen", units.units_seen, labelled),
        Case("head_votes", choice.head_votes, voted),
        *(
            Case(f"key_products-{r}-{i}", choice.key_products, keyed(r, i), (3, 4))
            for r, i in ((0, False), (10, False), (4, False), (10, True), (4, True))
        ),
        *(Case(f"expert_linear-{t}", experts.expert_linear, routed(t), (2,)) for t in (False, True)),
    ]  # fmt: skip


CASES = {case.name: case for case in cases()}
