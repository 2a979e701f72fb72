"""Operands for attention: masks, biases, sinks, trees, slots that were kept."""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.ir.ops import attention, flat, mass

from .op_case import LONGEST, Case, constant, key_positions, query_positions, randn


def attend(
    mask: str,
    size: int,
    heads: int,
    groups: int,
    bias: Any = None,
    cap: float = 0.0,
    sink: tuple[Tensor, ...] = (),
):
    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        k_pos = key_positions(rng, b, c)
        k_pos = torch.where(k_pos == LONGEST - 1, -1, k_pos) if c > LONGEST else k_pos
        return [
            randn(rng, b, heads, t, 10), randn(rng, b, groups, c, 10), randn(rng, b, groups, c, 6),
            query_positions(rng, b, t, c), k_pos, bias, 0.3, cap, mask, size, *sink,
        ]  # fmt: skip

    return make


def beside_kept(mask: str, size: int, heads: int, groups: int):
    """Seven more slots before the others, each head's own, some of them empty."""
    plain = attend(mask, size, heads, groups)

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        where = rng.permuted(np.tile(np.arange(7), (b, groups, 1)), axis=2)
        where = np.where(rng.random(where.shape) < 0.3, -1, where)
        kept = randn(rng, b, groups, 7, 10), randn(rng, b, groups, 7, 6), torch.from_numpy(where)
        return [*plain(b, t, c, rng), None, *kept]

    return make


def beside_unequal(mask: str, size: int, heads: int, groups: int):
    """As many more slots as each head has, none of one of them, one head's after another's; a row has room left."""
    plain = attend(mask, size, heads, groups)

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        counts = rng.integers(0, 9, (b, groups))
        counts[0, 0] = 0
        room = 8 * groups + 1
        where = rng.permuted(np.tile(np.arange(room), (b, 1, 1)), axis=2) % LONGEST
        where = np.where(np.arange(room) < counts.sum(1)[:, None, None], where, -1)
        kept = randn(rng, b, 1, room, 10), randn(rng, b, 1, room, 6), torch.from_numpy(where)
        operands = [*plain(b, t, c, rng), None, *kept]
        none = [None] * (17 - len(operands))
        return [*operands, *none, 0, None, None, torch.from_numpy(counts)]

    return make


def in_tree(
    mask: str, size: int, heads: int, groups: int, bias: Any = None, both_ways: bool = False
):
    """The call's own keys lie in the middle of the slots; every token hangs on a random earlier one. `both_ways`: it
    sees any others, those at later positions too.
    """
    plain = attend(mask, size, heads, groups, bias)

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        operands = plain(b, t, c, rng)
        first = torch.from_numpy(rng.integers(0, c - t + 1, b))
        tree = torch.zeros(b, t, t, dtype=torch.bool)
        for row, i in itertools.product(range(b), range(t)):
            if i:
                tree[row, i] = tree[row, rng.integers(0, i)]
            if both_ways:
                tree[row, i] = torch.from_numpy(rng.random(t) < 0.6)
            tree[row, i, i] = True
            operands[4][row, first[row] + i] = operands[3][row, i]
        return [*operands, None, None, None, None, tree, first]

    return make


def by_pages(mask: str, size: int, heads: int, groups: int, kept: bool = False):
    """Every query reads its own slot and up to four others, of its group's choice."""
    plain = beside_kept(mask, size, heads, groups) if kept else attend(mask, size, heads, groups)

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        operands = plain(b, t, c, rng)
        order = rng.permuted(np.tile(np.arange(c), (b, groups, t, 1)), axis=3)[..., :4]
        missing = np.full((b, groups, t, 4 - order.shape[3]), -1)
        own = np.broadcast_to(np.arange(t)[:, None], (b, groups, t, 1))
        order = np.where((rng.random(order.shape) < 0.2) | (order == own), -1, order)
        pages = np.concatenate([own, order, missing], axis=3)
        operands[4][:, :t] = torch.where(operands[3] < 0, operands[4][:, :t], operands[3])
        none = [None] * (16 - len(operands))
        return [*operands, *none, torch.from_numpy(pages), 1]

    return make


def beside_another(mask: str, groups: int, sink: bool = False, kept: bool = False):
    """A partial result over other keys; of some queries nothing was read there."""
    plain = beside_kept(mask, 4, 4, groups) if kept else attend(mask, 4, 4, groups)

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        operands = plain(b, t, c, rng)
        lse = randn(rng, b, 4, t)
        lse[torch.from_numpy(rng.random(lse.shape) < 0.2)] = torch.finfo(torch.float32).min
        if sink:
            operands[10:11] = [constant(4)]
        none = [None] * (17 - len(operands))
        return [*operands, *none, 0, randn(rng, b, 4, t, 6), lse]

    return make


def drawn(plain, noise: float | None = None):
    """What slots draw of queries, some of which count nothing; with a temperature of each row."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        operands = plain(b, t, c, rng)
        operands += [None] * (17 - len(operands))
        operands += [0, None, None, None][len(operands) - 17 :]
        share = torch.from_numpy((rng.random((b, t)) * 2).astype(np.float32).round(decimals=1))
        if noise is None:
            return [*operands, share]
        temperature = torch.from_numpy(rng.uniform(0.5, 2, b).astype(np.float32))
        return [*operands, share, temperature, torch.tensor(3), noise, 7]

    return make


def owners(b: int, t: int, rng: np.random.Generator) -> Tensor:
    """Whose each of t tokens is [t,2]; some rows have none, if there are more than one."""
    rows = np.sort(rng.integers(0, b, t))
    return torch.from_numpy(np.stack((rows, np.arange(t) - np.searchsorted(rows, rows)), axis=1))


def unpadded(plain):
    """Of rows that are padded on the right, the tokens that are theirs, one row after another."""

    def make(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
        owner = owners(b, t, rng)
        row, number = owner.unbind(1)
        q, k, v, q_pos, *rest = plain(b, int(number.max()) + 1, c, rng)
        flat_q, flat_pos = q[row, :, number].transpose(0, 1)[None].contiguous(), q_pos[row, number]
        operands = [flat_q, k, v, flat_pos[None], *rest]
        operands += [None] * (17 - len(operands))
        operands += [0, None, None, None][len(operands) - 17 :]
        return [*operands, owner]

    return make


def merging(b: int, t: int, c: int, rng: np.random.Generator) -> list[Any]:
    """Two partial results, the first of which read nothing for some queries, the second for one of these."""
    parts = [
        randn(rng, b, 4, t, 6),
        randn(rng, b, 4, t),
        randn(rng, b, 4, t, 6),
        randn(rng, b, 4, t) * 50,
    ]
    parts[1][:, :2, 0] = torch.finfo(torch.float32).min
    parts[3][:, 1, 0] = -torch.inf
    return parts


def attention_cases() -> list[Case]:
    masks = [("causal", 0), ("window", 1), ("window", 4), ("chunk", 3), ("full", 0)]
    made = [
        Case(f"attention-{m}{s or ''}-{h}over{g}", attention.attention, attend(m, s, h, g))
        for (m, s), (h, g) in itertools.product(masks, [(3, 3), (4, 2), (5, 1)])
    ]
    hidden = constant(4, LONGEST, LONGEST).masked_fill(
        torch.ones(LONGEST, LONGEST).triu(1).bool(), torch.finfo(torch.float32).min
    )
    for name, mask, bias, cap in [
        ("distance", "causal", constant(4, LONGEST), 0.0),
        ("short", "causal", constant(4, 3), 0.0),  # the last entry holds for all that is further
        ("table", "full", constant(4, LONGEST, LONGEST), 0.0),
        ("hidden", "full", hidden, 0.0),
        ("softcap", "window", None, 0.7),
        ("both", "causal", constant(4, LONGEST), 0.7),
    ]:
        made.append(
            Case(f"attention-{name}", attention.attention, attend(mask, 4, 4, 2, bias, cap), (5,))
        )
    for name, mask, groups, bias, cap in [
        ("sink", "causal", 4, None, 0.0),
        ("sink-grouped", "window", 2, constant(4, LONGEST), 0.7),
    ]:
        make = attend(mask, 4, 4, groups, bias, cap, (constant(4),))
        made.append(Case(f"attention-{name}", attention.attention, make, (5, 10)))
    for mask, groups, bias in [
        ("causal", 2, None), ("window", 4, constant(4, LONGEST)), ("full", 1, None), ("full", 4, None),
    ]:  # fmt: skip
        make = in_tree(mask, 4, 4, groups, bias)
        made.append(Case(f"attention-tree-{mask}-{groups}", attention.attention, make, (5,)))
    for mask, groups, bias in [
        ("causal", 2, None), ("window", 4, constant(4, LONGEST)), ("chunk", 2, None),
    ]:  # fmt: skip
        make = in_tree(mask, 4, 4, groups, bias, both_ways=True)
        made.append(Case(f"attention-block-{mask}-{groups}", attention.attention, make, (5,)))
    for op, mask, groups in itertools.product(
        (attention.attention, mass.attention_weights), ("causal", "window", "chunk"), (4, 2)
    ):
        make = beside_kept(mask, 4, 4, groups)
        made.append(Case(f"{op.name}-kept-{mask}-{groups}", op, make, (5,)))
    for op, mask in (
        (attention.attention, "causal"),
        (attention.attention, "window"),
        (attention.partial_attention, "chunk"),
        (mass.attention_weights, "causal"),
    ):
        made.append(Case(f"{op.name}-kept-unequal-{mask}", op, beside_unequal(mask, 4, 4, 2)))
    for mask, groups, kept in [
        ("causal", 2, False),
        ("window", 4, False),
        ("full", 1, False),
        ("chunk", 2, True),
    ]:
        name = f"attention-pages-{mask}-{groups}{'-kept' * kept}"
        made.append(Case(name, attention.attention, by_pages(mask, 4, 4, groups, kept)))
    for op, (mask, groups, sink, kept) in itertools.product(
        (attention.attention, attention.partial_attention),
        [("causal", 4, True, False), ("window", 2, False, False), ("causal", 1, False, True)],
    ):
        make = beside_another(mask, groups, sink, kept)
        name = f"{op.name}-beside-{mask}-{groups}"
        made.append(Case(name, op, make, (10,) if sink else ()))
    for name, plain, fixed in [
        ("causal", attend("causal", 0, 4, 2), ()),
        ("sink", attend("window", 4, 4, 4, constant(4, LONGEST), 0.7, (constant(4),)), (5, 10)),
        ("kept", beside_kept("chunk", 4, 5, 1), ()),
        ("unequal", beside_unequal("window", 4, 4, 2), ()),
    ]:
        made.append(Case(f"flat_attention-{name}", flat.flat_attention, unpadded(plain), fixed))
    partial = attention.partial_attention
    made.append(Case("partial_attention", partial, attend("causal", 0, 4, 2)))
    made.append(Case("partial_attention-pages", partial, by_pages("causal", 4, 4, 2)))
    made.append(Case("merge_attention", attention.merge_attention, merging))
    made.append(Case("attention_weights", mass.attention_weights, attend("causal", 0, 4, 2), (5,)))
    for name, plain, noise in [
        ("causal", beside_kept("causal", 4, 4, 2), None),
        ("window", beside_kept("window", 4, 4, 4), None),
        ("sink", beside_another("causal", 4, True), None),
        ("noise", beside_kept("window", 4, 4, 2), 1.0),
        ("warm", beside_another("causal", 1), 0.0),
    ]:
        fixed = (10,) if name == "sink" else (5,) if name in ("causal", "window", "noise") else ()
        made.append(Case(f"drawn-{name}", mass.drawn_attention, drawn(plain, noise), fixed))
    return made
