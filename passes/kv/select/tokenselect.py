"""TokenSelect (arXiv:2411.02886): the tokens that the heads of a layer vote for, by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.ops.attention import Form, operands_of
from accel.ir.ops.choice import best_pages, head_votes, key_products
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.passes.kv._shared.shift import tables
from accel.passes.kv.select._build import Build
from accel.passes.kv.select._sites import as_cached
from accel.passes.kv.select._tokens import Memory, Tokens, searches

_STEPS = 1024.0  # of a logit's unit: what is smaller is rounding


@dataclass(frozen=True)
class Tokenselect(Tokens):
    """Attend to the `tokens_read` tokens with the most votes, to the first `sinks` and the newest `window`: one list
    for all heads of a layer. A head votes with its softmax over the tokens between (without 1/√D, as in the release).

    Every candidate is scored as if it lay `window` tokens back: keys are turned to position 0 and queries to
    `window`, by the step's own tables. Where these depend on the call, or two rotations are not one (rope scaled
    by length), keys and queries are scored at their true positions.

    at: the positions at which attention reads keys. `list`: of the tokens of the list, in order, from 0 on, and the
    token itself behind them, as in the release; then no distance is longer than the list, so a model reads on beyond
    the length that it was trained on, where `dense_layers` is 0. `text`: their own.

    reuse: a token chooses by the query of the last search, among the tokens of that time, where the cosine of its own
    with it is `reuse` or more (all heads together); above 1, each token searches. Longer calls than FEW tokens, and
    what a batch holds of them, read everything: a prompt beyond the trained length goes in calls of FEW tokens.
    """

    tokens_read: int = 2048
    sinks: int = option(128, least=0)
    window: int = option(512, least=1)
    reuse: float = option(0.9, least=-1)
    at: str = option("text", one_of=("text", "list"))

    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 6, "sinks": 2, "window": 4, "dense_layers": 0,
    }  # fmt: skip

    @property
    def count(self) -> int:
        return self.sinks + self.tokens_read + self.window

    def memory(self, heads: int, width: int, groups: int) -> Memory:
        """The query of the last search, and the position of its token."""
        entries = {"query": ("float32", (heads * width,)), "at": ("int64", ())}
        return Memory({} if self.reuse > 1 else entries, merged=self.at == "list")

    def refusal(self, program: Program, node: fx.Node, plain: bool) -> str:
        if self.at != "list" or _rotated(node) is not None and as_cached(node, plain) == "":
            return super().refusal(program, node, plain)
        return "its keys are not cached as a rotation by position gives them; use at = 'text'"

    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The keys, and the tables of their rotation, continued to negative positions."""
        program, keys = build.program, operands_of(node).k
        editor = Editor(program, program.step.graph)
        found, new = {"keys": keys}, _rotated(node)
        if self.at == "list":
            found["values"] = operands_of(node).v
        if new is not None:
            cos, sin = operand_of(new, "cos"), operand_of(new, "sin")
            try:
                both = tables(
                    program, node.meta["layer"], cos, sin, f"{self.full_name} with at = 'list'"
                )
            except PassError:
                if self.at == "list":
                    raise
                return found
            name = f"choice.{node.meta['layer']}"
            kind = "interleaved" if operand_of(new, "interleaved") else "halves"
            with editor.graph.inserting_before(node):
                for n, table in zip((f"cos.{kind}", f"sin.{kind}"), both, strict=True):
                    found[n] = editor.param(f"{name}.{n}", table)
        return found

    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        keys, positions, k_pos, slots = x["keys"], x["positions"], x["k_pos"], x["slots"]
        queries, turned = self.turned(x)
        (batch, tokens, heads, width), groups = queries.shape, keys.shape[1]
        at, new = positions, {}
        if self.reuse <= 1:
            flat = queries.flatten(2)
            which = searches(flat, before["query"], known, self.reuse)
            flat = torch.cat((before["query"][:, None], flat), dim=1)
            flat = flat.gather(1, which[..., None].expand(-1, -1, flat.shape[2]))
            at = torch.cat((before["at"][:, None], positions), dim=1).gather(1, which)
            queries, new = flat.unflatten(2, (heads, width)), {"query": flat, "at": at}
        own = slots[:, None] + torch.arange(tokens, device=slots.device)
        places = torch.arange(k_pos.shape[1], device=slots.device)
        where = k_pos[:, None]  # [B,1,C]
        between = (where >= self.sinks) & (where <= (at - self.window)[..., None])
        between = between & mask.visible(positions[..., None], where)
        between = between & (places >= self.sinks) & (places <= (own - self.window)[..., None])
        rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
        logits = key_products(rows, keys, *turned).reshape(batch, heads, tokens, -1)
        # keys at position 0 may be equal (of equal tokens in the first layer): then the earlier one is chosen
        worth = head_votes(logits, between[:, None], _STEPS)
        listed = best_pages(
            worth, positions, k_pos, slots, self.tokens_read + 1, 1, mask.kind, mask.size
        )
        first = torch.arange(self.sinks, device=slots.device).expand(batch, tokens, -1)
        first = torch.where(first < own[..., None], first, -1)
        near = own[..., None] - 1 - torch.arange(self.window - 1, device=slots.device)
        near = torch.where(near >= self.sinks, near, -1)
        read = torch.cat((listed, torch.cat((first, near), dim=2)[:, None]), dim=3)
        if self.at == "list":
            out, lse = self.in_order(x, mask, read[:, 0], own)
            new = {**new, "out": out, "lse": lse}
            read = own[:, None, :, None]
        return read.expand(-1, groups, -1, -1).contiguous(), new

    def in_order(
        self, x: Mapping[str, Tensor], mask: Form, read: Tensor, slot: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention over the slots `read` [B,T,K] without the token's own [B,T], which lie at positions from 0 on and
        the token behind them: [B,H,T,Dv], and its log-sum-exp [B,H,T]; the lowest number where there are none.
        """
        tokens, groups, capacity = x["queries"].shape[1], x["keys"].shape[1], x["keys"].shape[2]
        count = self.count  # K: a call that chooses has so many slots
        read = read.index_select(2, torch.arange(count, device=read.device))
        slots = torch.where((read < 0) | (read == slot[..., None]), capacity, read).sort(-1).values
        there = slots < capacity  # [B,T,K]
        slots = slots.clamp(max=capacity - 1)
        number = there.long().cumsum(-1)
        kind = "interleaved" if "cos.interleaved" in x else "halves"
        both = x[f"cos.{kind}"], x[f"sin.{kind}"], kind == "interleaved"
        zero = both[0].shape[0] // 2
        now = x["k_pos"].gather(1, slots.flatten(1))  # [B,T K]
        to = zero + (number.flatten(1) - 1 - now).clamp(min=-zero)
        index = slots.flatten(1)[:, None, :, None]
        keys, values = (
            x[n].gather(2, index.expand(-1, groups, -1, x[n].shape[3])).float()
            for n in ("keys", "values")
        )
        keys = rope.reference(keys, to, *both).unflatten(2, (tokens, count))  # [B,G,T,K,D]
        behind = zero + (number[..., -1] - x["positions"]).clamp(min=-zero)
        queries = rope.reference(x["queries"].float().transpose(1, 2), behind, *both)
        queries = queries.unflatten(1, (groups, -1)).transpose(2, 3)  # [B,G,T,R,D]
        lowest = torch.finfo(torch.float32).min
        logits = mask.logits(queries @ keys.mT).masked_fill(~there[:, None, :, None], lowest)
        top = logits.amax(-1, keepdim=True)
        shares = (logits - top).exp() * there[:, None, :, None]
        total = shares.sum(-1, keepdim=True)
        out = shares @ values.unflatten(2, (tokens, count)) / total.clamp(min=1e-30)  # [B,G,T,R,Dv]
        lse = torch.where(total > 0, top + total.clamp(min=1e-30).log(), lowest).squeeze(-1)
        return out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2)

    def turned(self, x: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        """Queries [B,T,H,D] as at position `window`, and what turns keys to 0: see `key_products`."""
        queries = x["queries"]
        for kind in ("interleaved", "halves"):
            if f"cos.{kind}" not in x:
                continue
            both, form = (x[f"cos.{kind}"], x[f"sin.{kind}"]), kind == "interleaved"
            most = both[0].shape[0] // 2
            at = most - x["k_pos"].clamp(min=0)
            to = most + (self.window - x["positions"]).clamp(max=most)
            # not the operator: kernels of it take no more slots than tables have rows
            queries = rope.reference(queries.transpose(1, 2), to, *both, form).transpose(1, 2)
            return queries, (at, *both, form)
        return queries, ()


def _rotated(node: fx.Node) -> fx.Node | None:
    """The rotation that gives the keys of an attention as they are cached; none where something else does."""
    keys = operands_of(node).k
    new = operand_of(keys, "new") if keys.target is kv_append.default else None
    return new if isinstance(new, fx.Node) and new.target is rope.default else None
