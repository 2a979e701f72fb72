"""SpeCache (arXiv:2503.16163): a copy of the cache in a few bits is read whole, and of the cache itself, outside
memory, the rows that the step before asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import Form, operands_of
from accel.ir.ops.choice import best_pages
from accel.ir.ops.groups import block_sizes, group_dequantize, midpoint_quantize
from accel.ir.ops.kv import kv_append
from accel.ir.ops.pages import fetch_pages, kv_pages, pages_written, read_pages
from accel.ir.program import Program
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.passes.kv.select import MAPPED, PAGES, SPARSE, Sizes
from accel.passes.kv.select._build import Build, Named
from accel.passes.kv.select._sites import as_cached
from accel.passes.kv.select._tokens import Memory, Tokens

_ROLES = {"k": "rows", "v": "channels"}  # of one scale: tokens of a channel, channels of a token


@dataclass(frozen=True)
class Specache(Tokens):
    """Keys and values lie in mapped files. In memory is a copy of them in `bits`, of blocks of `group` tokens: keys
    with a scale for each channel of a block, values for `group` channels of a token, levels in the middle of 2^bits
    equal parts. A token reads its own block as it is, and of the blocks before it the copy, but for `tokens_read` rows
    of each KV head, which it reads as they are: those that the token before it gave most attention to in the copy, by
    the share of the query head of the group that gave most. So they are known a step ahead, and are fetched while the
    step goes on with later layers.

    With `guess` a guess of the token asks for them, which the step before fed and dropped (`loop = specache`), as in
    the paper: where it is right, a token reads about the rows that it would ask for itself. The guess reads those that
    the token beside it does. Where none was fed, the token before asks. The first token behind a prompt, or behind any
    call that reads everything, asks for its own, as in the paper.
    A call of up to FEW tokens gives the logits of single tokens; longer ones read everything, and no copy.

    Bytes of the copy, for a token, layer and KV head: D · bits/8 + 4 D/group of keys, D · bits/8 + 4 ⌈D/group⌉ of
    values; and 33 · 8 (G `tokens_read` + 1) of a row and layer for the rows asked for. Rows that a step reads as
    they are are hidden in the copy, so one softmax is over all tokens, each once. With rows for all tokens the
    logits are the model's. The copies of a layer are decoded in each call that chooses.
    """

    tokens_read: int = option(64, least=0)
    bits: int = option(2, one_of=(1, 2, 4, 8))
    group: int = option(32, one_of=PAGES)
    guess: bool = False

    layout = MAPPED
    relies = Tokens.relies | {Invariant.TOKENS_CONTIGUOUS, Invariant.UNIFORM_SLOTS}
    breaks = SPARSE | {Invariant.PLAIN_KEYS}
    small: ClassVar[Mapping[str, Any]] = {"tokens_read": 6, "group": 4, "dense_layers": 0}

    @property
    def count(self) -> int:
        """Its own block, and the rows."""
        return self.group + self.tokens_read

    def memory(self, heads: int, width: int, groups: int) -> Memory:
        """The rows that the next token reads."""
        rows = {"rows": ("int64", (groups * self.tokens_read,))} if self.tokens_read else {}
        return Memory(rows, merged=True, guessed=self.guess)

    def refusal(self, program: Program, node: fx.Node, plain: bool) -> str:
        return as_cached(node, plain)

    def copied(self, role: str, width: int) -> dict[str, tuple[str, Sizes]]:
        """The copy of a block of keys ("k") or values ("v") of D = `width` numbers: name -> (dtype, sizes after
        [B,G,N]).
        """
        codes, scales = block_sizes(self.group, width, self.bits, self.group, _ROLES[role])
        half = ("float16", (scales,))
        return {role: ("uint8", (codes,)), f"{role}.scale": half, f"{role}.least": half}

    def encoded(self, role: str, x: Tensor) -> list[Tensor]:
        """Blocks [B,G,N,group,D] -> their copy."""
        return list(midpoint_quantize(x, self.bits, self.group, _ROLES[role]))

    def decoded(self, role: str, copy: list[Tensor], width: int) -> Tensor:
        """Their numbers [B,G,N group,D]."""
        found: Tensor = group_dequantize(
            *copy, self.bits, self.group, _ROLES[role], self.group, width
        )
        return found

    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The cache, and the copy as it is after the call."""
        x, layer, every = operands_of(node), node.meta["layer"], build.every(self.group)
        found = {"keys": x.k, "values": x.v}
        for role, cache in (("k", x.k), ("v", x.v)):
            groups, width = int(sizes(cache)[1]), int(sizes(cache)[3])
            copied = self.copied(role, width)
            held = build.declare(
                Part.PAGES, layer,
                {n: (dtype, ("B", groups, every, *tail)) for n, (dtype, tail) in copied.items()},
            )  # fmt: skip
            call = {"cache": cache, "q_pos": x.q_pos, "slots": build.program.step.input("slots")}
            updated = partial(self._updated, role, list(copied))
            new = build.made(node, f"pages.{layer}", updated, call | held, ("copy", self, role))
            build.becomes(Part.PAGES, layer, new)
            found |= new
        return found

    def _updated(self, role: str, names: list[str], x: Named) -> Named:
        """The copy after a call of positions [B,T] wrote keys or values from slots [B] on into [B,G,C,D]."""
        first, count = pages_written(x["cache"], x["q_pos"], x["slots"], self.group)
        new = self.encoded(role, kv_pages(x["cache"], first, count, self.group).float())
        return {n: kv_append(x[n], one, first) for n, one in zip(names, new, strict=True)}

    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        queries, k_pos, slots = x["queries"], x["k_pos"], x["slots"]
        tokens, width, groups = queries.shape[1], queries.shape[3], x["keys"].shape[1]
        keys, values = (
            self.decoded(role, [x[role], x[f"{role}.scale"], x[f"{role}.least"]], wide)
            for role, wide in (("k", width), ("v", x["values"].shape[3]))
        )
        own = slots[:, None] + torch.arange(tokens, device=slots.device)  # [B,T]
        begin = own.div(self.group, rounding_mode="floor") * self.group
        ahead = torch.arange(self.group, device=slots.device)
        block = begin[..., None] + ahead  # [B,T,group]
        listed = torch.where(block <= own[..., None], block, -1)[:, None].expand(-1, groups, -1, -1)
        places = torch.arange(keys.shape[2], device=slots.device)
        where = k_pos.index_select(1, places.clamp(max=k_pos.shape[1] - 1))
        visible = mask.visible(x["positions"][..., None], where[:, None])
        seen = (visible & (places < begin[..., None]))[:, None]  # [B,1,T,C]
        by_group = queries.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B,G,heads,T,D]
        products = by_group.flatten(2, 3).float() @ keys.mT
        logits = mask.logits(products).unflatten(2, (-1, tokens))  # [B,G,heads,T,C]
        new = {}
        if self.tokens_read:
            end = (own + 1).div(self.group, rounding_mode="floor") * self.group
            later = (visible & (places < end[..., None]))[:, None]  # by the next token
            if self.guess:  # by the token that comes here
                later = seen
            lowest = torch.finfo(logits.dtype).min / 2
            shares = logits.masked_fill(~later[:, :, None], lowest).log_softmax(-1)
            worth = shares.amax(2)
            rows = self._rows(worth, later, x)  # [B,G,T,k]
            for cache in (x["keys"], x["values"]):  # while later layers run
                rows = fetch_pages(rows, cache, 1)
            new["rows"] = rows.transpose(1, 2).flatten(2)
            mine = self._rows(worth[:, :, :1], seen[:, :, :1], x)
            told = before["rows"].unflatten(1, (groups, 1, -1))
            first = torch.where(known[:, None, None, None], told, mine)
            asked = torch.cat((first, rows), dim=2).narrow(2, 0, tokens)
            if self.guess:
                second = torch.arange(tokens, device=asked.device)[:, None] == 1
                asked = torch.where(second, first, asked)
            listed = torch.cat((listed, asked), dim=3)
        exact = read_pages(listed, 1, places.shape[0])  # [B,G,T,C]
        copied = seen & ~exact
        lowest = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~copied[:, :, None], lowest)
        top = logits.amax(-1, keepdim=True)
        shares = (logits - top).exp().masked_fill(~copied[:, :, None], 0.0)
        total = shares.sum(-1, keepdim=True)
        out = shares.flatten(2, 3) @ values
        out = out.unflatten(2, (-1, tokens)) / total.clamp(min=1e-30)
        lse = torch.where(total > 0, top + total.clamp(min=1e-30).log(), lowest).squeeze(-1)
        return listed.contiguous(), {**new, "out": out.flatten(1, 2), "lse": lse.flatten(1, 2)}

    def _rows(self, worth: Tensor, seen: Tensor, x: Mapping[str, Tensor]) -> Tensor:
        """The rows worth most [B,G,T,k] of those that are seen, none behind a token; -1 where there are fewer."""
        following = x["positions"][:, : worth.shape[2]], x["k_pos"], x["slots"] + 1
        worth = worth.masked_fill(~seen, -torch.inf)
        best: Tensor = best_pages(worth, *following, self.tokens_read + 1, 1, "full", 0)
        return best.index_select(3, torch.arange(1, self.tokens_read + 1, device=best.device))
