"""The dialect in ONNX; attention as grouped products over the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from accel.ir.ops import attention, kv, mass, norm, rope, rows
from accel.ir.ops.noise import PRIME
from accel.lowering.onnx.rules.accel_pages import gathered, page_mask
from accel.lowering.onnx.rules.accel_ragged import in_slots, padded
from accel.lowering.onnx.rules.aten_nn import product
from accel.lowering.onnx.writer.branch import either
from accel.lowering.onnx.writer.builder import DTYPES, Builder
from accel.lowering.onnx.writer.table import lower

Operands = attention.Operands[str]  # names of values
BLOCK = 128  # slots of a product at once where rows must not change a bit; C is a multiple of it
_NOTHING = torch.finfo(torch.float32).min
_LAST = (1 << 63) - 1  # where a slice ends: behind everything


@lower(norm.rms_norm.default)
def rms_norm(b: Builder, x: str, weight: str, eps: float) -> str:
    return str(b.node("RMSNormalization", x, weight, axis=-1, epsilon=eps))


@lower(norm.add_rms_norm.default)
def add_rms_norm(b: Builder, x: str, y: str, weight: str, eps: float) -> tuple[str, str]:
    """In two nodes, which on a CPU are faster than onnxruntime's SkipSimplifiedLayerNormalization
    (docs/figures/details/kernels.md)."""
    total = str(b.node("Add", x, y))
    return rms_norm(b, total, weight, eps), total


@lower(norm.add_layer_norm.default)
def add_layer_norm(
    b: Builder, x: str, y: str, weight: str, bias: str | None, eps: float
) -> tuple[str, str]:
    """In two nodes, a third of the time of onnxruntime's SkipLayerNormalization."""
    total = str(b.node("Add", x, y))
    return str(b.node("LayerNormalization", total, weight, bias, axis=-1, epsilon=eps)), total


@lower(norm.gate.default)
def gate(b: Builder, gate: str, up: str, act: str) -> str:
    return str(b.node("Mul", _activate(b, gate, act), up))


def _activate(b: Builder, x: str, act: str) -> str:
    if act == "silu":
        return str(b.node("QuickGelu", x, domain="com.microsoft", alpha=1.0))
    if act in ("gelu", "gelu_tanh"):
        return str(b.node("Gelu", x, approximate="tanh" if act == "gelu_tanh" else "none"))
    return str(b.node({"relu": "Relu", "sigmoid": "Sigmoid"}[act], x))


@lower(rope.rope.default)
def rotate(b: Builder, x: str, positions: str, cos: str, sin: str, interleaved: bool) -> str:
    turned = 2 * int(b.shape(cos)[1])
    width = int(b.shape(x)[3])
    return str(
        b.node(
            "RotaryEmbedding", x, cos, sin, _known(b, positions),
            interleaved=int(interleaved), rotary_embedding_dim=0 if turned == width else turned,
        )
    )  # fmt: skip


def _known(b: Builder, positions: str) -> str:
    """Positions with padding (-1) read as 0."""
    return str(b.node("Max", positions, b.constant(0, torch.int64)))


@lower(rows.lookup.default)
def lookup(b: Builder, table: str, positions: str) -> str:
    return str(b.node("Gather", table, _known(b, positions), axis=0))


@lower(rows.take_rows.default)
def take_rows(b: Builder, x: str, rows: str) -> str:
    return str(b.node("GatherND", x, b.node("Unsqueeze", rows, b.ints(-1)), batch_dims=1))


@lower(rows.given_rows.default)
def given_rows(b: Builder, x: str, rows: str, mask: str) -> str:
    return str(b.node("Where", b.node("Unsqueeze", mask, b.ints(-1)), rows, x))


@lower(kv.kv_append.default)
def kv_append(b: Builder, buffer: str, new: str, slots: str) -> str:
    return str(b.node("TensorScatter", buffer, new, slots, axis=1 if b.rank(buffer) == 2 else 2))


@lower(attention.attention.default)
def attend(b: Builder, *operands: Any, **more: Any) -> str:
    """Over chosen pages: of one token only these are read, of several all slots, most of them hidden."""
    x = padded(b, Operands(*operands, **more))
    return _over_pages(b, x, lambda x: [_attend(b, x)], [b.out])[0]


@lower(attention.partial_attention.default)
def attend_partly(b: Builder, *operands: Any, **more: Any) -> Sequence[str]:
    """The same, and the logarithm of what the weights were divided by."""
    x = padded(b, Operands(*operands, **more))
    return _over_pages(b, x, lambda x: [_attend(b, x), _log_sum(b, x)], b.out)


@lower(attention.merge_attention.default)
def merge(b: Builder, x: str, x_lse: str, y: str, y_lse: str) -> tuple[str, str]:
    least = b.constant(_NOTHING, torch.float32)
    sums = [b.node("Max", lse, least) for lse in (x_lse, y_lse)]
    top = b.node("Max", *sums)
    shares = [b.node("Exp", b.node("Sub", lse, top)) for lse in sums]
    total = b.node("Add", *shares)
    parts = [
        b.node("Mul", value, b.node("Unsqueeze", b.node("Div", share, total), b.ints(-1)))
        for value, share in zip((x, y), shares, strict=True)
    ]
    return str(b.node("Add", *parts)), str(b.node("Add", top, b.node("Log", total)))


def _over_pages(
    b: Builder, x: Operands, read: Callable[[Operands], Sequence[str]], outs: Sequence[Any]
) -> Sequence[str]:
    """What `read` gives over the pages that the call chose."""
    if x.pages is None:
        return read(x)
    whole, tokens = replace(x, pages=None), b.size(x.pages, 2)

    def chosen() -> tuple[str, ...]:
        single = b.node("Equal", tokens, b.constant(1, torch.int64))
        return either(b, single, lambda: read(gathered(b, x)), lambda: read(x), list(outs))

    some = b.node("Greater", tokens, b.constant(0, torch.int64))
    return either(b, some, chosen, lambda: read(whole), list(outs))


def _attend(b: Builder, x: Operands) -> str:
    """softmax(scale · q kᵀ + mask) v with the R query heads of a group as rows of one product."""
    heads, groups, wide = int(b.shape(x.q)[1]), int(b.shape(x.k)[1]), int(b.shape(x.v)[3])
    probs, keys = _weights(b, x)
    v = x.v
    if x.kept_v is not None:
        shared = x.v == x.k and x.kept_v == x.kept_k
        v = keys if shared else str(b.node("Concat", x.kept_v, x.v, axis=2))
    out = _in_blocks(b, probs, v) if b.batch_invariant else b.node("MatMul", probs, v)
    if x.beside is not None:
        every = b.node("Softmax", _scores(b, x)[0], axis=-1)
        share = b.node("Slice", every, b.ints(-1), b.ints(_LAST), b.ints(3))
        beside = b.node("Reshape", x.beside, b.ints(0, groups, -1, wide))
        out = b.node("Add", out, b.node("Mul", share, beside))
    if heads == groups:
        return str(out)
    return str(b.node("Reshape", out, b.concat_ints([0, heads, b.size(x.q_pos, 1), wide])))


@lower(mass.attention_weights.default)
def attention_weights(b: Builder, *operands: Any, **more: Any) -> str:
    """The weights again (equal nodes are one node), those of padding left out."""
    x = Operands(*operands, **more)
    heads = int(b.shape(x.q)[1])
    repeat = heads // int(b.shape(x.k)[1])
    probs = in_slots(b, x, _weights(b, padded(b, x))[0])
    places = b.node("Unsqueeze", x.q_pos, b.ints(1, 3))
    real = b.node("GreaterOrEqual", places, b.constant(0, torch.int64))
    real = b.node("Cast", real, to=DTYPES[torch.float32])  # [B,1,T,1]
    if repeat == 1:
        return str(b.node("Mul", probs, real))
    real = b.node("Tile", real, b.ints(1, 1, repeat, 1))
    shape = b.concat_ints([0, heads, b.size(x.q_pos, 1), -1])
    return str(b.node("Reshape", b.node("Mul", probs, real), shape))


@lower(mass.drawn_attention.default)
def drawn_attention(b: Builder, *operands: Any, **more: Any) -> str:
    """A product of the shares with the weights, or with those of a softmax with noise."""
    x = mass.Drawn[str](*operands, **more)
    groups = int(b.shape(x.k)[1])
    real = b.node("GreaterOrEqual", x.q_pos, b.constant(0, torch.int64))
    share = b.node("Mul", x.share, b.node("Cast", real, to=DTYPES[torch.float32]))
    share = b.node("Tile", b.node("Unsqueeze", share, b.ints(1, 2)), b.ints(1, 1, 1, _repeat(b, x)))
    flat, x = x, _padded(b, x)
    probs = _weights(b, x)[0] if x.temperature is None else _noisy(b, x, x.temperature)
    probs = in_slots(b, flat, probs)
    drawn = b.node("MatMul", share, probs)  # [B,1,1,R·T] [B,G,R·T,S]
    return str(b.node("Reshape", drawn, b.ints(0, groups, -1)))


def _padded(b: Builder, x: mass.Drawn[str]) -> mass.Drawn[str]:
    found = padded(b, x)
    assert isinstance(found, mass.Drawn)
    return found


def _repeat(b: Builder, x: Operands) -> int:
    return int(b.shape(x.q)[1]) // int(b.shape(x.k)[1])


def _noisy(b: Builder, x: mass.Drawn[str], temperature: str) -> str:
    """softmax((scores + noise g) / temperature) [B,G,R·T,S]."""
    scores, _, more = _scores(b, x)
    if more:
        scores = str(b.node("Slice", scores, b.ints(0), b.ints(-more), b.ints(3)))
    hidden = b.node("Less", scores, b.constant(_NOTHING / 2, torch.float32))
    if x.noise:
        noise = b.node("Mul", _gumbel(b, x), b.constant(x.noise, torch.float32))
        scores = str(b.node("Add", scores, noise))
    scores = b.node("Div", scores, b.node("Reshape", temperature, b.ints(-1, 1, 1, 1)))
    scores = b.node("Where", hidden, b.constant(-1e30, torch.float32), scores)
    seen = b.node("Cast", b.node("Not", hidden), to=DTYPES[torch.float32])
    return str(b.node("Mul", b.node("Softmax", scores, axis=-1), seen))


def _gumbel(b: Builder, x: mass.Drawn[str]) -> str:
    """The noise of `ir/ops/noise.py` for each head, query and slot [B,G,R·T,S]."""
    groups, repeat = int(b.shape(x.k)[1]), _repeat(b, x)
    prime = b.constant(PRIME, torch.int64)

    def number(n: int) -> str:
        return str(b.constant(n, torch.int64))

    def left(value: str) -> str:
        return str(b.node("Mod", value, prime))

    def squared(value: str, more: int) -> str:
        return left(b.node("Add", b.node("Mul", value, value), number(more)))

    def mixed(value: str, more: str) -> str:
        more = b.node("Add", more, number(1))
        return squared(left(b.node("Add", b.node("Mul", value, number(48271)), more)), 12345)

    assert x.layer is not None, "where there is noise"
    heads = b.constant(torch.arange(1, groups * repeat + 1).reshape(1, groups, repeat, 1))
    found = mixed(mixed(number(x.seed % PRIME), x.layer), str(heads))
    found = mixed(found, str(b.node("Unsqueeze", x.q_pos, b.ints(1, 2))))  # [B,G,R,T]
    found = str(b.node("Reshape", found, b.ints(0, groups, -1, 1)))
    where = b.node("Unsqueeze", x.k_pos, b.ints(1))
    if x.kept_pos is not None:
        where = b.node("Expand", where, b.ints(1, groups, 1))
        where = b.node("Concat", x.kept_pos, where, axis=2)
    found = mixed(found, str(b.node("Unsqueeze", where, b.ints(2))))
    for _ in range(2):
        found = squared(left(b.node("Add", b.node("Mul", found, number(69621)), number(1))), 6789)
    u = b.node(
        "Add", b.node("Cast", found, to=DTYPES[torch.float32]), b.constant(0.5, torch.float32)
    )
    u = b.node("Div", u, b.constant(float(PRIME + 1), torch.float32))
    u = b.node("Clip", u, b.constant(1e-9, torch.float32), b.constant(1 - 1e-7, torch.float32))
    return str(b.node("Neg", b.node("Log", b.node("Neg", b.node("Log", u)))))


def _weights(b: Builder, x: Operands) -> tuple[str, str]:
    """softmax(scale · q kᵀ + mask) [B,G,R·T,S], and the keys [B,G,S,D] with those that were kept."""
    scores, k, more = _scores(b, x)
    probs = str(b.node("Softmax", scores, axis=-1))
    if more:
        probs = str(b.node("Slice", probs, b.ints(0), b.ints(-more), b.ints(3)))
    return probs, k


def _log_sum(b: Builder, x: Operands) -> str:
    """log of the sum of exp(scores): [B,H,T]."""
    scores = _scores(b, x)[0]
    top = b.node("ReduceMax", scores, b.ints(-1))
    total = b.node("ReduceSum", b.node("Exp", b.node("Sub", scores, top)), b.ints(-1))
    lse = b.node("Add", top, b.node("Log", total))
    return str(b.node("Reshape", lse, b.ints(0, int(b.shape(x.q)[1]), -1)))


def _scores(b: Builder, x: Operands) -> tuple[str, str, int]:
    """scale · q kᵀ + mask [B,G,R·T,S+E], the keys [B,G,S,D] with those that were kept, and E: how many scores stand
    behind those of keys.
    """
    heads, groups = int(b.shape(x.q)[1]), int(b.shape(x.k)[1])
    width, repeat = int(b.shape(x.q)[3]), heads // groups
    k = x.k if x.kept_k is None else str(b.node("Concat", x.kept_k, x.k, axis=2))
    rows = (
        x.q if repeat == 1 else b.node("Reshape", x.q, b.ints(0, groups, -1, width))
    )  # [B,G,R·T,D]
    inner = 1.0 / x.softcap if x.softcap else 1.0
    scores = product(b, rows, k, torch.float32, rank=4, scale=x.scale * inner)  # [B,G,R·T,C]
    if x.softcap:
        scores = b.node("Mul", b.node("Tanh", scores), b.constant(x.softcap, torch.float32))
    hidden = position_mask(b, x)
    if x.bias is not None:
        if repeat > 1:
            shape = b.concat_ints([0, groups, -1, b.size(x.k_pos, 1)])
            hidden = b.node("Reshape", hidden, shape)
    elif repeat > 1 and (x.mask != "full" or x.tree or x.pages):  # which is [B,1,1,C]
        hidden = b.node("Tile", hidden, b.ints(1, 1, repeat, 1))
    scores = str(b.node("Add", scores, hidden))
    more = []
    if x.sink is not None:
        more.append(_sink_column(b, x.sink, x.q_pos, groups))
    if x.beside_lse is not None:
        lse = b.node("Max", x.beside_lse, b.constant(_NOTHING, torch.float32))
        more.append(b.node("Reshape", lse, b.ints(0, groups, -1, 1)))
    if more:
        scores = str(b.node("Concat", scores, *more, axis=3))
    return scores, k, len(more)


def _in_blocks(b: Builder, probs: str, v: str) -> str:
    """probs [B,G,M,C] @ v [B,G,C,D], in an order of sums that neither M, C nor the threads change.

    A product whose inner axis is longer is cut where its rows and threads suggest; one of BLOCK is not.
    """
    wide = int(b.shape(v)[3])
    cut = b.node("Reshape", probs, b.ints(0, 0, 0, -1, BLOCK))  # [B,G,M,n,BLOCK]
    rows = b.node("Transpose", cut, perm=[0, 1, 3, 2, 4])
    groups = int(b.shape(v)[1])
    values = b.node("Reshape", v, b.ints(0, groups, -1, BLOCK, wide))  # [B,G,n,BLOCK,D]
    sums = b.node("CumSum", b.node("MatMul", rows, values), b.constant(2, torch.int64))
    return str(b.node("Gather", sums, b.constant(-1, torch.int64), axis=2))


def _sink_column(b: Builder, sink: str, q_pos: str, groups: int) -> str:
    """One more score per head: [B,G,R·T,1]."""
    heads = int(b.shape(sink)[0])
    shape = b.concat_ints([b.size(q_pos, 0), heads, b.size(q_pos, 1), 1])
    column = b.node("Expand", b.node("Reshape", sink, b.ints(1, heads, 1, 1)), shape)
    if groups < heads:
        column = b.node("Reshape", column, b.ints(0, groups, -1, 1))
    return str(column)


def position_mask(b: Builder, x: Operands) -> str:
    """What is added to the scores: [B,1,T,C] ([B,1,1,C] under "full"), with a bias [B,H,T,C], before
    kept slots' [B,G,T,P+C].
    """
    own = _own(b, x) if x.tree else None
    hidden = _hidden(b, x.q_pos, x.k_pos, x.mask, x.window, own)
    if x.pages is not None:
        hidden = str(b.node("Min", hidden, page_mask(b, x, _NOTHING)))
    if x.kept_pos is not None:
        groups = int(b.shape(x.kept_pos)[1])
        hidden = b.node("Expand", hidden, b.ints(1, groups, 1, 1))
        before = _hidden(b, x.q_pos, x.kept_pos, x.mask, x.window)
        if own is not None and x.mask == "full":
            before = str(b.node("Expand", before, b.concat_ints([1, 1, b.size(x.q_pos, 1), 1])))
        return str(b.node("Concat", before, hidden, axis=3))
    if x.bias is None:
        return hidden
    return str(b.node("Add", _bias(b, x.bias, x.q_pos, x.k_pos, x.mask), hidden))


def _own(b: Builder, x: Operands) -> tuple[str, str]:
    """Which slots are not the call's own, bool [B,1,1,C], and which of all a tree lets each query see, bool [B,1,T,C]
    (`ir.ops.attention.own_visible`).
    """
    zero, one = b.constant(0, torch.int64), b.constant(1, torch.int64)
    tree = b.node("Expand", x.tree, b.concat_ints([b.size(x.q_pos, 0), b.size(x.q_pos, 1), 1]))
    slots = b.node("Range", zero, b.node("Squeeze", b.size(x.k_pos, 1)), one)
    own = b.node("Sub", slots, b.node("Unsqueeze", x.first, b.ints(1)))  # [B,C]
    last = b.node("Sub", b.node("Squeeze", b.size(tree, 2)), one)
    cached = b.node("Or", b.node("Less", own, zero), b.node("Greater", own, last))
    cached = b.node("Unsqueeze", cached, b.ints(1))
    index = b.node("Unsqueeze", b.node("Max", b.node("Min", own, last), zero), b.ints(1))
    index = b.node("Expand", index, b.concat_ints([1, b.size(tree, 1), 1]))  # [B,T,C]
    seen = b.node("GatherElements", tree, index, axis=2)
    seen = b.node("Or", seen, cached)
    return str(b.node("Unsqueeze", cached, b.ints(1))), str(b.node("Unsqueeze", seen, b.ints(1)))


def _hidden(
    b: Builder, q_pos: str, k_pos: str, mask: str, window: int, tree: tuple[str, str] | None = None
) -> str:
    """[B,1,T,C] ([B,G,T,P] for positions [B,G,P]): 0 where the query may look, the lowest finite
    number elsewhere.

    Written once per mask class, not once per layer: equal nodes are one node.
    """
    q = b.node("Unsqueeze", q_pos, b.ints(1, 3))  # [B,1,T,1]
    k = b.node(
        "Unsqueeze", k_pos, b.ints(*((1, 2) if b.rank(k_pos) == 2 else (2,)))
    )  # [B,1 or G,1,C]
    seen = visible(b, q, k, mask, window)
    if tree is not None:
        cached, theirs = tree
        if mask != "full":
            ahead = visible(b, q, k, mask, window, ahead=True)
            seen = b.node("Or", seen, b.node("And", ahead, b.node("Not", cached)))
        seen = b.node("And", seen, theirs)
    return str(
        b.node("Where", seen, b.constant(0.0, torch.float32), b.constant(_NOTHING, torch.float32))
    )


def visible(b: Builder, q: str, k: str, mask: str, window: int, ahead: bool = False) -> str:
    """What positions q [..,T,1] may see of k [..,1,C], bool [..,T,C] (`ir.ops.attention.Mask`)."""
    zero = b.constant(0, torch.int64)
    seen = b.node("GreaterOrEqual", k, zero)
    if mask != "full" and not ahead:
        seen = b.node("And", seen, b.node("LessOrEqual", k, q))
    if mask == "window":
        oldest = b.node("Sub", q, b.constant(window, torch.int64))
        seen = b.node("And", seen, b.node("Greater", k, oldest))
    if mask == "chunk":
        size = b.constant(window, torch.int64)
        blocks = [b.node("Div", b.node("Max", p, zero), size) for p in (q, k)]
        seen = b.node("And", seen, b.node("Equal", *blocks))
    return str(seen)


def _bias(b: Builder, bias: str, q_pos: str, k_pos: str, mask: str) -> str:
    """[B,H,T,C] out of a table [H,M] or [H,2M-1] by distance, or [H,M,M] by both positions."""
    shape = b.shape(bias)
    last = b.constant(int(shape[1]) - 1, torch.int64)
    zero = b.constant(0, torch.int64)
    q = b.node("Unsqueeze", q_pos, b.ints(2))  # [B,T,1]
    k = b.node("Unsqueeze", k_pos, b.ints(1))  # [B,1,C]
    if len(shape) == 2:
        distance = b.node("Sub", q, k)
        if mask == "full":  # of either sign
            distance = b.node("Add", distance, b.constant(int(shape[1]) // 2, torch.int64))
        index = b.node("Max", b.node("Min", distance, last), zero)  # [B,T,C]
        found = b.node("Gather", bias, index, axis=1)  # [H,B,T,C]
    else:
        flat = b.node("Reshape", bias, b.ints(int(shape[0]), -1))
        wide = b.constant(int(shape[2]), torch.int64)
        index = b.node("Add", b.node("Mul", b.node("Max", q, zero), wide), b.node("Max", k, zero))
        found = b.node("Gather", flat, index, axis=1)
    return str(b.node("Transpose", found, perm=[1, 0, 2, 3]))
