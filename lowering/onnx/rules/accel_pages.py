"""Pages of the cache in ONNX: what is read of them, and attention over those that were chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from accel.ir.ops import attention, pages
from accel.lowering.onnx.writer.builder import Builder
from accel.lowering.onnx.writer.table import lower

Operands = attention.Operands[str]


@lower(pages.kv_pages.default)
def kv_pages(b: Builder, buffer: str, first: str, count: Any, page: int) -> Any:
    """Buffers have a multiple of BLOCK slots here, so that no page reaches past them."""
    one, zero, wide = (b.constant(n, torch.int64) for n in (1, 0, page))
    numbers = b.node("Range", zero, b.node("Mul", b.operand(count, torch.int64), wide), one)
    slots = b.node("Add", b.node("Unsqueeze", b.node("Mul", first, wide), b.ints(1)), numbers)
    slots = b.node("Reshape", slots, b.ints(0, 1, -1, page, 1))
    slots = b.node("Expand", slots, b.ints(1, int(b.shape(buffer)[1]), 1, 1, 1))
    return b.node("GatherND", buffer, slots, batch_dims=2)


@lower(pages.few_to_many.default)
def few_to_many(b: Builder, q_pos: str, k_pos: str, tokens: int, slots: int) -> Any:
    few = b.node("LessOrEqual", b.size(q_pos, 1), b.constant(tokens, torch.int64))
    return b.node("And", few, b.node("Greater", b.size(k_pos, 1), b.constant(slots, torch.int64)))


@lower(pages.fetch_pages.default)
def fetch_pages(b: Builder, listed: str, buffer: str, page: int) -> Any:
    """Nothing is fetched ahead."""
    return listed


def gathered(b: Builder, x: Operands) -> Operands:
    """Attention of one token over its pages -> over slots of each head's own."""
    listed = b.node(
        "Max", b.node("Reshape", x.pages, b.ints(0, 0, -1, 1)), b.constant(0, torch.int64)
    )

    def taken(buffer: str) -> str:  # [B,G,C,D] -> [B,G,K page,D]
        wide = int(b.shape(buffer)[3])
        whole = b.node("Reshape", buffer, b.ints(0, 0, -1, x.page * wide))
        found = str(
            b.node(
                "Reshape", b.node("GatherND", whole, listed, batch_dims=2), b.ints(0, 0, -1, wide)
            )
        )
        b.meta[found] = b.meta[buffer]
        return found

    where = b.node(
        "GatherND", b.node("Reshape", x.k_pos, b.ints(0, -1, x.page)), listed, batch_dims=1
    )
    missing = b.node(
        "Reshape", b.node("Less", x.pages, b.constant(0, torch.int64)), b.ints(0, 0, -1, 1)
    )
    where = b.node("Where", missing, b.constant(-1, torch.int64), where)
    where = str(b.node("Reshape", where, b.ints(0, 0, -1)))
    b.meta[where] = torch.empty(1, 1, 1, dtype=torch.int64, device="meta")
    return replace(x, k=taken(x.k), v=taken(x.v), k_pos=where, pages=None)


def page_mask(b: Builder, x: Operands, hides: float) -> str:
    """What is added to the scores of slots [B,G,T,C]: 0 in the pages that a query reads, else `hides`."""
    one = b.constant(1, torch.int64)
    slots = b.size(x.k_pos, 1)
    count = b.node("Div", slots, b.constant(x.page, torch.int64))
    listed = b.node("Where", b.node("Less", x.pages, b.constant(0, torch.int64)), count, x.pages)
    groups, tokens = int(b.shape(str(x.pages))[1]), b.size(x.q_pos, 1)
    shape = b.concat_ints([b.size(x.q_pos, 0), groups, tokens, b.node("Add", count, one)])
    nothing = b.node("Expand", b.constant(hides, torch.float32), shape)
    here = b.node("Expand", b.constant(0.0, torch.float32), b.node("Shape", x.pages))
    mask = b.node("ScatterElements", nothing, listed, here, axis=3)
    mask = b.node(
        "Slice", mask, b.ints(0), b.ints(-1), b.ints(3)
    )  # the last one is of those that are none
    mask = b.node("Unsqueeze", mask, b.ints(4))
    mask = b.node("Expand", mask, b.ints(1, 1, 1, 1, x.page))
    return str(b.node("Reshape", mask, b.concat_ints([0, 0, 0, slots])))
