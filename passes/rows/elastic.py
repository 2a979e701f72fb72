"""Layers that compute some rows of a call, and all of them above the one whose attention has drifted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.invariants import Method
from accel.ir.ops.attention import Form, form_of, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.rows import take_rows
from accel.ir.picks import NONE, Picks
from accel.ir.program import Editor, Program
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.fuse.residual import Residual
from accel.passes.rows.partial import Layer, inverse, mixed_heads, opened, stored_rows
from accel.passes.state.layers import Layers

STREAM, QUERIES, MARK = "stream", "q", "mark"
_EPSILON = 1e-12


@dataclass(frozen=True)
class Elastic(Pass):
    """Inputs `every_row []` and `picks [B,K]` of the step, which is given the whole canvas: where a call does not
    compute every row, layers compute `picks`, columns of the call, and the tracked tokens. What other rows have, the
    stream behind each layer and queries, keys and values, is as it was last computed, in new state
    `outputs.<layer>.stream` [B,1,C,E], `outputs.<layer>.q` [B,H,C,D] and in the cache.

    Each layer tracks one token, `outputs.<layer>.mark` [B,1,C,1]: the one to which the first `window` masks attend
    most. In the next call each layer compares the attention of all tracked tokens before and after its keys are
    written. Where the cosine, over slots, is below `threshold` in the mean of tokens and heads, the layers above
    compute all rows; of each row of the batch for itself.

    user: the method whose calls leave out rows.
    """

    user: Method = field(compare=False)
    window: int
    threshold: float

    after = (Layers, Residual)
    must_change = True
    stage = 3  # after the weights and the cache are stored

    def run(self, program: Program) -> Report:
        diffusion = program.facts.diffusion
        if diffusion is None or diffusion.mask is None:
            raise PassError(
                f"{self.user.full_name}: the model has no mask token (config.mask_token_id); leave the method out"
            )
        calls, flag, picks = opened(program, self.user.full_name)
        layers = [Layer.of(program, i, call) for i, call in enumerate(calls)]
        stores = [_stores(layer) for layer in layers]
        marks = [store[MARK] for store in stores]
        state = _before(program, calls[0], flag, picks, marks, diffusion.mask, self.window)
        for layer, store in zip(layers, stores, strict=True):
            state["drift"] = _split(program, layer, store, state, self.threshold)
        program.facts.picks = Picks()
        return Report(changed=len(layers))


_COMMON = ("rows", "at", "place", "taken", "window", "tracked", "known", "drift")


def _stores(layer: Layer) -> dict[str, fx.Node]:
    """The new state of a layer, in the step."""
    (site,) = layer.sites
    queries = operands_of(site).q.meta["val"]
    return {
        STREAM: layer.store(STREAM),
        QUERIES: layer.store(QUERIES, int(queries.shape[1]), int(queries.shape[3])),
        MARK: layer.store(MARK, 1, 1),
    }


def _before(
    program: Program,
    first: fx.Node,
    flag: fx.Node,
    picks: fx.Node,
    marks: list[fx.Node],
    mask: int,
    window: int,
) -> dict[str, fx.Node]:
    """What all layers are given of a call (`_COMMON`), before the first of them."""

    def common(
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        every: Tensor,
        picks: Tensor,
        *marks: Tensor,
    ) -> tuple[Tensor, ...]:
        real = positions >= 0
        masks = (tokens == mask) & real
        order = masks.to(torch.int64).cumsum(1) * masks  # 1: the first mask; 0: none
        nth = order[:, None] == torch.arange(1, window + 1, device=picks.device)[:, None]
        near = _first(nth)
        held = torch.stack([stored_rows(m, slots, positions)[:, 0, :, 0] for m in marks], 1)
        tracked = _once(_first((held > 0) & real[:, None]))
        asked = torch.where(
            real.any(1, keepdim=True), picks, NONE
        )  # [B,K]; by default picks are [1,1]
        rows = _once(torch.cat([asked, tracked], 1))
        place, taken = inverse(rows, rows, positions)
        at = positions.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -1)
        drift = every.expand(tokens.shape[0])
        return rows, at, place, taken, near, tracked, real & ~masks, drift

    editor, step = Editor(program, program.step.graph), program.step
    operands = [step.input(n) for n in ("tokens", "positions", "slots")]
    with step.graph.inserting_before(first):
        key = "elastic", mask, window, len(marks)
        made = trace(editor, "elastic", common, *operands, flag, picks, *marks, key=key)
    return dict(zip(_COMMON, made, strict=True))


def _first(hits: Tensor) -> Tensor:
    """The first column of each that is hit, bool [B,N,T], or NONE: [B,N]."""
    return torch.where(hits.any(2), hits.to(torch.int64).argmax(2), NONE)


def _once(rows: Tensor) -> Tensor:
    """Columns [B,K], each the first time alone; NONE for what is no column."""
    order = torch.arange(rows.shape[1], device=rows.device)
    again = ((rows[:, :, None] == rows[:, None]) & (order[:, None] > order)).any(2)
    return rows.masked_fill(again | (rows < 0), NONE)


def _split(
    program: Program,
    layer: Layer,
    stores: dict[str, fx.Node],
    state: dict[str, fx.Node],
    threshold: float,
) -> fx.Node:
    """Give a layer a graph that computes some rows, and let both of its graphs keep what the others had. Which rows of
    the batch have drifted in it or below, bool [B], in the step.
    """
    step, call = program.step, layer.call
    with step.graph.inserting_before(call):
        anywhere = Editor(program, step.graph).call(
            torch.ops.aten.any.default, state["drift"], like=call
        )
    new = {**state, **stores, **{n: step.input(n) for n in ("slots", "positions")}}
    layer.added([v for v in new.values() if v not in call.args])
    inside = {name: layer.holder(value) for name, value in new.items()}
    _keep(program, layer, layer.whole, inside, threshold, part=False)
    copies = {name: layer.copies[holder] for name, holder in inside.items()}
    _part(program, layer, copies)
    _keep(program, layer, layer.part, copies, threshold, part=True)
    (drift,) = layer.close(anywhere, [str(s.target) for s in stores.values()])
    return drift


def _part(program: Program, layer: Layer, inside: dict[str, fx.Node]) -> None:
    """Let `part` compute its rows alone."""
    first = next(n for n in layer.part.nodes if n.op == "call_function")
    with layer.part.inserting_before(first):
        operands = layer.copies[layer.stream], inside["rows"]
        x = trace(Editor(program, layer.part), "picked", _picked, *operands, key="picked rows")
    last = first.prev
    layer.rows(x, inside["at"], inside["rows"], last)
    layer.refresh(last)


def _picked(x: Tensor, rows: Tensor) -> Tensor:
    found: Tensor = take_rows(x, rows.clamp(min=0))
    return found


def _keep(
    program: Program,
    layer: Layer,
    graph: fx.Graph,
    inside: dict[str, fx.Node],
    threshold: float,
    part: bool,
) -> None:
    """Let a graph of a layer write what it computed anew and what was stored of other rows, and tell whether attention
    has drifted.
    """
    editor = Editor(program, graph)
    of = (lambda n: layer.copies[n]) if part else (lambda n: n)
    keys, values = map(of, layer.appends)
    (site,) = map(of, layer.sites)
    common = [inside[n] for n in ("place", "taken", "drift", "slots", "positions")]

    def mix(new: fx.Node, store: fx.Node) -> Any:
        return trace(editor, "mix", _mixing(part), *common, new, store, key=("mix", part))

    first = min(keys, values, key=list(graph.nodes).index)
    kept = {}
    for append in (keys, values):
        with graph.inserting_before(append):
            kept[append] = mix(append.args[1], append.args[0])
        append.update_arg(1, kept[append][0])
    if part:
        layer.refresh(first)
    (out,) = graph.find_nodes(op="output")
    stream, *others = out.args[0]
    given = operands_of(site)
    more = {n: v for n, v in (("sink", given.sink), ("bias", given.bias)) if v is not None}
    dtype = inside[MARK].meta["val"].dtype
    follow = _following(form_of(given), threshold, tuple(more), dtype)
    with graph.inserting_before(out):
        lifted = editor.call(torch.ops.aten.unsqueeze.default, stream, 1)
        stream, _ = mix(lifted, inside[STREAM])
        queries, old = mix(given.q, inside[QUERIES])
        told = [inside[n] for n in ("positions", "window", "tracked", "known", "drift")]
        heads = old, queries, kept[keys][1], kept[keys][0]
        key = "follow", form_of(given), threshold, tuple(more), dtype
        drift, marked = trace(editor, "follow", follow, *told, *heads, *more.values(), key=key)
        written = [
            editor.call(kv_append.default, inside[n], new, inside["slots"])
            for n, new in ((STREAM, stream), (QUERIES, queries), (MARK, marked))
        ]
        stream = editor.call(torch.ops.aten.squeeze.dim, stream, 1)
    out.args = ((stream, *others, *written, drift),)


def _mixing(part: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of what a graph computed of its rows [B,H,K,D] and what is stored of a call's columns: [B,H,T,D], and the second
    alone.
    """

    def mix(
        place: Tensor,
        taken: Tensor,
        drift: Tensor,
        slots: Tensor,
        positions: Tensor,
        new: Tensor,
        store: Tensor,
    ) -> tuple[Tensor, Tensor]:
        old = stored_rows(store, slots, positions)
        if part:
            return mixed_heads(new, place, taken, old), old
        fresh = taken | drift[:, None]
        return torch.where(fresh[:, None, :, None], new, old), old

    return mix


def _following(
    form: Form, threshold: float, more: tuple[str, ...], dtype: torch.dtype
) -> Callable[..., Any]:
    """Whether the attention of tracked tokens has drifted, and which token is tracked next."""

    def follow(
        positions: Tensor,
        window: Tensor,
        tracked: Tensor,
        known: Tensor,
        drift: Tensor,
        old: Tensor,
        new: Tensor,
        old_keys: Tensor,
        keys: Tensor,
        *others: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Queries [B,H,T,D] and keys [B,G,T,D] before and after; bool [B], and marks [B,1,T,1]."""
        operands: dict[str, Any] = dict(zip(more, others, strict=True))
        whole = replace(form, **operands)
        where = positions[:, None].expand(-1, keys.shape[1], -1)

        def drawn(q: Tensor, columns: Tensor, k: Tensor) -> Tensor:
            index = columns.clamp(min=0)
            at = positions.gather(1, index).masked_fill(columns < 0, -1)
            queries = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
            return whole.weights(queries, at, k, where)

        a, b = drawn(old, tracked, old_keys), drawn(new, tracked, keys)  # [B,G,R,N,T]
        scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt().clamp(min=_EPSILON)
        near = ((a * b).sum(-1) / scale).mean((1, 2))
        there = tracked >= 0
        mean = (near * there).sum(1) / there.sum(1).clamp(min=1)
        far = (mean < threshold) & there.any(1)
        mass = drawn(new, window, keys).sum((1, 2, 3)) * known
        best = mass.argmax(1, keepdim=True)
        columns = torch.arange(positions.shape[1], device=positions.device)
        marked = (columns == best) & (mass > 0)
        return drift | far, marked[:, None, :, None].to(dtype)

    return follow
