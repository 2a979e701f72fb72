"""Multi-head latent attention (arXiv:2405.04434): cache the latent that keys and values are made of."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.op import set_operand
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace
from accel.passes.recognise.attention import Attention, ungroup
from accel.passes.recognise.region import (
    CHANNEL_OPS,
    Kinds,
    close,
    is_pick,
    numbering,
    packet,
    try_out,
)
from accel.passes.recognise.rope import Rope

aten = torch.ops.aten
_WORTH = 3  # a latent this many times smaller than keys and values is cached instead of them


@dataclass
class _Site:
    """One attention whose keys and values are linear in a latent, `up` channels of the keys and all
    of the values; the other channels of the keys are the same for every head.
    """

    latent: fx.Node  # [B,T,L] or [B,1,T,L]
    key: Tensor  # [H,P,L]: q' = q · key
    value: Tensor  # [H,L,Dv]: result = result' · value + shift
    shift: Tensor  # [H,1,Dv]
    parts: list[
        tuple[fx.Node | None, int]
    ]  # of the keys: (shared value [B,1,T,P] or the latent, P)


@dataclass(frozen=True)
class Latent(Pass):
    """attention(q, [up_k(c); p], up_v(c)) -> up_v(attention([q·up_k; q_p], [c; p], [c; p])), one KV head.

    The scores are the same sums in another order, so a token's cache is the latent c and the part p that
    heads share (its rotary channels), stored once for keys and values. The products with `up_k` and
    `up_v` are read off by trying c on unit vectors, whatever stands between c and the heads.
    """

    after = (Attention, Rope)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds, order = Kinds(graph), numbering(graph)
        for layer, node in enumerate(
            graph.find_nodes(op="call_function", target=attention.default)
        ):
            site = _read(program, kinds, order, node)
            if isinstance(site, _Site):
                _rewrite(program, node, site, layer)
                report.changed += 1
            elif site:
                report.refused.append(f"{node.name}: {site}")
        if report.changed:
            Clean().run(program)
        return report


def _read(program: Program, kinds: Kinds, order: dict[fx.Node, int], node: fx.Node) -> _Site | str:
    """What an attention's keys and values are made of; empty where that is no latent."""
    x = operands_of(node)
    q, k, v = x.q, x.k, x.v
    heads = sizes(q)[1]
    if sizes(k)[1] != heads or int(heads) == 1:
        return ""
    parts: list[Any] = [k]
    if packet(k) is aten.cat and k.args[1:] in ((-1,), (3,)):
        parts = list(k.args[0])
    shared = {p: base for p in parts if sizes(base := ungroup(program, p))[1] == "1"}
    own = [p for p in parts if p not in shared]
    if len(own) != 1:
        return ""
    extra = sum(int(sizes(p)[3]) for p in shared)
    full = int(heads) * (int(sizes(k)[3]) + int(sizes(v)[3]))
    why = ""
    for latent in _common(own[0], v, kinds, order):
        if full < _WORTH * (int(sizes(latent)[-1]) + extra):
            continue
        key, value = (_matrix(program, latent, n) for n in (own[0], v))
        if key is None or value is None:
            why = f"its keys and values are not a linear function of {latent.name}"
            continue
        if x.softcap and bool(key[1].any()):
            return "a soft cap over keys that have a bias"
        if x.sink is not None and bool(value[1].any()):
            return "probabilities that do not sum to 1 over values that have a bias"
        widths = [(shared.get(p), int(sizes(p)[3])) for p in parts]
        return _Site(
            latent, key[0].transpose(1, 2).contiguous(), value[0].contiguous(), value[1], widths
        )
    return why


def _common(a: fx.Node, b: fx.Node, kinds: Kinds, order: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Values [B,T,L] or [B,1,T,L] that a and b are computed from, through nothing else but parameters:
    walks back from both, latest node first; where one value is left, every path goes through it.
    """
    heap = [(-order[n], n) for n in {a, b}]
    heapq.heapify(heap)
    queued = {a, b}
    while heap:
        _, latest = heapq.heappop(heap)
        shape = latest.meta["val"].shape if isinstance(latest.meta.get("val"), Tensor) else ()
        if not heap and latest not in (a, b) and len(shape) in (3, 4):
            if len(shape) == 3 or sizes(latest)[1] == "1":
                yield latest
        op = packet(latest)
        if op is not aten.linear and op not in CHANNEL_OPS and not is_pick(latest):
            return
        for parent in latest.all_input_nodes:
            if kinds[parent] == "pos":
                return
            if kinds[parent] == "data" and parent not in queued:
                queued.add(parent)
                heapq.heappush(heap, (-order[parent], parent))


def _matrix(program: Program, latent: fx.Node, value: fx.Node) -> tuple[Tensor, Tensor] | None:
    """(weight [H,L,P], bias [H,1,P]) of value [B,H,T,P] = latent · weight + bias; none where it is not."""
    wide = len(sizes(latent)) == 4
    width = int(sizes(latent)[-1])

    def run(x: Tensor) -> Tensor:  # [B,T,L] -> [B,H,T,P]
        positions = torch.arange(x.shape[1]).repeat(x.shape[0], 1)
        return try_out(program, value, {latent: x.unsqueeze(1) if wide else x}, positions)

    bias = run(torch.zeros(1, 1, width))[0]
    weight = run(torch.eye(width)[None])[0] - bias
    sample = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2))
    if not close(run(sample), sample.unsqueeze(1) @ weight + bias, 1e-5):
        return None
    return weight, bias


def _rewrite(program: Program, node: fx.Node, site: _Site, layer: int) -> None:
    graph = program.step.graph
    editor = Editor(program, graph)
    q: Any = node.args[0]
    latent, width = site.latent, int(sizes(site.latent)[-1])
    with graph.inserting_before(node):
        queries: list[fx.Node] = []
        keys: list[fx.Node] = []
        start = 0
        for base, size in site.parts:
            part = _channels(editor, q, start, size, site.parts)
            start += size
            if base is None:
                up = editor.param(f"latent.{layer}.key", site.key)
                queries.insert(0, editor.call(aten.matmul.default, part, up, like=node))
            else:
                queries.append(part)
                keys.append(base)
        if len(sizes(latent)) == 3:
            latent = editor.call(aten.unsqueeze.default, latent, 1, like=node)
        new_q, new_k = queries[0], latent
        if keys:
            new_q = editor.call(aten.cat.default, queries, -1, like=node)
            new_k = editor.call(aten.cat.default, [latent, *keys], -1, like=node)
        out = editor.call(attention.default, *node.args, like=node, **node.kwargs)
        for name, value in (("q", new_q), ("k", new_k), ("v", new_k)):
            set_operand(out, name, value)
        out.meta["val"] = editor.value(out)
        if keys:
            out = editor.call(aten.slice.Tensor, out, 3, 0, width, like=node)
        down = editor.param(f"latent.{layer}.value", site.value)
        out = editor.call(aten.matmul.default, out, down, like=node)
        if bool(site.shift.any()):
            shift = editor.param(f"latent.{layer}.shift", site.shift.contiguous())
            out = editor.call(aten.add.Tensor, out, shift, like=node)
    replace(node, out)


def _channels(
    editor: Editor, q: fx.Node, start: int, size: int, parts: list[tuple[fx.Node | None, int]]
) -> fx.Node:
    """Channels start .. start+size-1 of a query; the part itself where the query is joined alike."""
    if len(parts) == 1:
        return q
    if packet(q) is aten.cat and q.args[1:] in ((-1,), (3,)):
        begin = 0
        for part in q.args[0]:  # type: ignore[union-attr]
            width = int(sizes(part)[3])  # type: ignore[arg-type]
            if (begin, width) == (start, size):
                return part  # type: ignore[return-value]
            begin += width
    return editor.call(aten.slice.Tensor, q, 3, start, start + size, like=q)
