"""Layers that keep what attention and the MLP gave, and compute the rows of a call whose values changed most."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from accel.ir.invariants import Method
from accel.ir.ops.kv import kv_append
from accel.ir.ops.rows import take_rows
from accel.ir.picks import CHOSEN, Picks
from accel.ir.program import Editor, Program
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.depth._branches import Branches, branches
from accel.passes.depth._narrow import narrow
from accel.passes.fuse.residual import Residual
from accel.passes.rows.partial import Layer, inverse, mixed, mixed_heads, opened, stored_rows
from accel.passes.state.layers import Layers

ATTN, MLP = "attn", "mlp"
_EPSILON = 1e-8


@dataclass(frozen=True)
class Stored(Pass):
    """Inputs `every_row []` and `picks [B,K]` of the step: where a call does not compute every row, a layer computes
    queries, keys, attention and MLP of `picks` alone, columns of the call, or, where one is -1, of the rows whose
    values are least like those in the cache (cosine over all heads). Values are computed of all rows of the call. What
    attention and the MLP add to the stream of the other rows is as it was last computed, in new state
    `outputs.<layer>.attn` and `outputs.<layer>.mlp` [B,1,C,E].

    The first layer computes every row of a call. user: the method whose calls leave out rows.
    """

    user: Method = field(compare=False)

    after = (Layers, Residual)
    must_change = True
    stage = 3  # after the weights and the cache are stored

    def run(self, program: Program) -> Report:
        calls, flag, picks = opened(program, self.user.full_name)
        layers = [Layer.of(program, i, call) for i, call in enumerate(calls)][1:]
        found = [branches(program, layer.call, mlp=False) for layer in layers]
        for layer, of in zip(layers, found, strict=True):
            _split(program, layer, of, flag, picks)
        program.facts.picks = Picks(first=1)
        return Report(changed=len(layers))


def _split(program: Program, layer: Layer, of: Branches, flag: fx.Node, picks: fx.Node) -> None:
    """Give a layer a graph that computes some rows, and let both of its graphs store what its branches add."""
    step = program.step
    terms = {n: t for n, t in ((ATTN, of.attention), (MLP, of.mlp)) if t}
    added = {name: [t.value for t in some] for name, some in terms.items()}
    stores = {name: layer.store(name) for name in terms}
    call = [step.input(n) for n in ("slots", "positions")]
    layer.added([picks, *stores.values(), *(v for v in call if v not in layer.call.args)])
    slots, positions, chosen = (layer.holder(v) for v in (*call, picks))
    held = {name: layer.holder(store) for name, store in stores.items()}
    _keep(program, layer, added, held, slots)

    keys, values = layer.appends
    part, new, buffer = layer.part, values.args[1], values.args[0]
    assert isinstance(new, fx.Node) and isinstance(buffer, fx.Node)
    first = next(n for n in part.nodes if n.op == "call_function")
    value = layer.again(new, first)
    editor, inside = Editor(program, part), layer.copies
    with part.inserting_before(first):
        operands = inside[layer.stream], value, inside[buffer]
        x, at, place, taken, written = trace(
            editor, "picked", _picked, *operands, *map(inside.__getitem__, (slots, positions, chosen)),
            key="picked",
        )  # fmt: skip
    last = first.prev
    layer.rows(x, at, inside[chosen], last)
    layer.refresh(last)
    append = inside[keys]
    assert isinstance(append.args[1], fx.Node) and isinstance(append.args[0], fx.Node)
    with part.inserting_before(append):
        operands = append.args[1], place, taken
        where = append.args[0], inside[slots], inside[positions]
        rows = trace(editor, "keys", _keys, *operands, *where, key="mixed keys")
    append.update_arg(1, rows)
    inside[values].update_arg(1, written)
    layer.refresh(append)
    _join(program, layer, added, held, (place, taken, inside[slots], inside[positions]))
    narrow(program, part)
    layer.close(flag, [str(s.target) for s in stores.values()])


Values = dict[str, list[fx.Node]]
Stores = dict[str, fx.Node]


def _keep(program: Program, layer: Layer, added: Values, stores: Stores, slots: fx.Node) -> None:
    """Let a layer that computes every row store what its branches add."""
    (out,) = layer.whole.find_nodes(op="output")
    editor, found = Editor(program, layer.whole), []
    with layer.whole.inserting_before(out):
        for name, store in stores.items():
            operands, key = (store, slots, *added[name]), ("stores", len(added[name]))
            found.append(trace(editor, name, _stores, *operands, key=key))
    out.args = ((*out.args[0], *found),)


def _join(
    program: Program, layer: Layer, added: Values, stores: Stores, rows: tuple[fx.Node, ...]
) -> None:
    """Let the stream of a layer that leaves out rows be what its branches add to that of every row, new or stored."""
    (out,) = layer.part.find_nodes(op="output")
    editor, found = Editor(program, layer.part), []
    stream = layer.copies[layer.stream]
    with layer.part.inserting_before(out):
        for name, store in stores.items():
            values = [layer.copies[v] for v in added[name]]
            operands = stream, layer.copies[store], *rows, *values
            stream, stored = trace(editor, name, _joins, *operands, key=("joins", len(values)))
            found.append(stored)
    out.args = ((stream, *out.args[0][1:], *found),)


def _picked(
    x: Tensor, new: Tensor, buffer: Tensor, slots: Tensor, positions: Tensor, picks: Tensor
) -> tuple[Tensor, ...]:
    """The rows [B,K,E] of a stream [B,T,E] that a layer computes, their positions [B,K], where they are among the
    columns (`inverse`), and the values [B,G,T,D] that it writes.
    """
    old = stored_rows(buffer, slots, positions)
    a, b = (v.transpose(1, 2).flatten(2).float() for v in (new, old))
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt().clamp(min=_EPSILON)
    near = (a * b).sum(-1) / scale
    columns = torch.arange(positions.shape[1], device=picks.device)
    named = (picks.unsqueeze(2) == columns).any(1)
    near = near.masked_fill(named | (positions < 0), torch.inf)
    order = near.sort(dim=1, stable=True)[1]
    first = torch.arange(picks.shape[1], device=picks.device).expand(picks.shape)
    rows = torch.where(picks == CHOSEN, order.gather(1, first), picks.clamp(min=0))
    place, taken = inverse(rows, picks, positions)
    at = positions.gather(1, rows).masked_fill(picks < CHOSEN, -1)
    written = torch.where((positions >= 0)[:, None, :, None], new, old)
    return take_rows(x, rows), at, place, taken, written


def _keys(
    new: Tensor, place: Tensor, taken: Tensor, buffer: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    return mixed_heads(new, place, taken, stored_rows(buffer, slots, positions))


def _stores(store: Tensor, slots: Tensor, *values: Tensor) -> Tensor:
    found: Tensor = kv_append(store, _sum(values).unsqueeze(1), slots)
    return found


def _joins(
    stream: Tensor,
    store: Tensor,
    place: Tensor,
    taken: Tensor,
    slots: Tensor,
    positions: Tensor,
    *values: Tensor,
) -> tuple[Tensor, Tensor]:
    rows = mixed(_sum(values), place, taken, stored_rows(store, slots, positions))
    return stream + rows, kv_append(store, rows.unsqueeze(1), slots)


def _sum(values: tuple[Tensor, ...]) -> Tensor:
    first, *others = values
    for other in others:
        first = first + other
    return first
