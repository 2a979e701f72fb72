"""Attention in its exported forms becomes one operator with explicit positions and a named mask."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.capture.encoder import FEATURES
from accel.ir.errors import PassError
from accel.ir.ops.attention import Mask, attention, operands_of
from accel.ir.ops.recurrence import RECURRENT
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace
from accel.passes.recognise.heads import as_heads, concrete, restore, swapped
from accel.passes.recognise.mask import (
    DENSE_LIMIT,
    HIDDEN,
    Class,
    classify,
    evaluate_mask,
    telling_length,
)
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.products import spell_out
from accel.passes.recognise.region import Kinds, close, numbering, packet, try_out
from accel.passes.recognise.scores import (
    Written,
    find_written,
    read_scale,
    read_sink,
    region_key,
    scores_at,
)
from accel.passes.recognise.sides import positions_of, reach, shows_padding

aten = torch.ops.aten
_GROUPING = {  # moves on the way from KV heads to heads
    getattr(aten, n)
    for n in "clone view reshape _unsafe_view expand unsqueeze repeat_interleave contiguous "
    "transpose permute".split()
}


@dataclass
class _Site:
    """One attention, read: where its result is, and its operands as [B,H,T,D].

    Its mask is given by `hide` (mask, value that hides), `add` and `causal`, or by what is
    `written` between q·kᵀ and the softmax.
    """

    result: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    softcap: float = 0.0
    hide: list[tuple[fx.Node, bool]] = field(default_factory=list)
    add: list[fx.Node] = field(default_factory=list)
    causal: bool = False
    sink: Tensor | None = None
    written: Written | None = None
    key: Hashable = None  # equal keys: equal masks


@dataclass(frozen=True)
class Attention(Pass):
    """scaled_dot_product_attention, or softmax(f(q kᵀ)) v written out  ->  accel.attention.

    What is done to the scores is tried on numbers: it must be a scale, a soft cap and a mask, which
    is named (causal, window, chunk, full, plus a bias by distance). A score beside those of the keys
    is the attention's sink; KV heads that were repeated for the product are read unrepeated.

    Before and after: `tests/passes/texts/attention.before.txt`, `attention.after.txt`.
    """

    after = (Clean, Positions)

    def run(self, program: Program) -> Report:
        report = Report()
        spell_out(program)
        graph = program.step.graph
        kinds, order = Kinds(graph), numbering(graph)
        masks: dict[Hashable, Class | str] = {}
        report.changed += _place(program)
        for node in list(graph.nodes):
            for site in _sites(program, kinds, order, node):
                found = site if isinstance(site, str) else _read(program, kinds, site, masks)
                if isinstance(site, str) or isinstance(found, str):
                    report.refused.append(f"{node.name}: {found}")
                    continue
                self._rewrite(program, site, found)
                report.changed += 1
        if report.refused and report.changed:
            raise PassError(f"Attention cannot read {report.refused[0]}")
        if not report.changed and not program.facts.stateless and not program.nodes(*RECURRENT):
            nearest = (report.refused or ["no candidate in the graph"])[0]
            raise PassError(f"Attention changed nothing. Nearest miss: {nearest}")
        Clean().run(program)
        return report

    def _rewrite(self, program: Program, site: _Site, mask_class: Class) -> None:
        graph = program.step.graph
        editor = Editor(program, graph)
        q_pos, k_pos = (positions_of(program, sizes(n)[2]) for n in (site.q, site.k))
        k, v = ungroup(program, site.k), ungroup(program, site.v)
        if sizes(k)[1] != sizes(v)[1]:
            k, v = site.k, site.v
        bias = sink = None
        with graph.inserting_before(site.result):
            if mask_class.bias is not None:
                heads = int(sizes(site.q)[1])
                full = mask_class.bias.expand(heads, *mask_class.bias.shape[1:]).contiguous()
                bias = editor.param(f"bias.{_same_bias(program, full)}", full)
            if site.sink is not None:
                sink = editor.param(f"sink.{site.result.name}", site.sink)
            new = editor.call(
                attention.default, site.q, k, v, q_pos, k_pos, bias,
                site.scale, site.softcap, mask_class.mask.kind, mask_class.mask.size,
                *([] if sink is None else [sink]), like=site.result,
            )  # fmt: skip
        replace(site.result, restore(program, new, site.result))


def _place(program: Program) -> int:
    """Give the attentions of forms (`ir/capture/forms`), which count their tokens, the program's own positions. What
    an attention may have is an operand by name, as in all that passes make.
    """
    found = program.nodes(attention.default)
    for node in found:
        x = operands_of(node)
        read, stored = (positions_of(program, sizes(side)[2]) for side in (x.q, x.k))
        named = {f.name: f.default for f in fields(x) if f.default is not MISSING}
        given = {name: getattr(x, name) for name in named}
        node.args = (x.q, x.k, x.v, read, stored, *node.args[5 : len(fields(x)) - len(named)])
        node.kwargs = {name: value for name, value in given.items() if value is not named[name]}
    return len(found)


def unread(program: Program) -> str | None:
    """The first attention that cannot be read, and why; none such: None."""
    kinds, order = Kinds(program.step.graph), numbering(program.step.graph)
    for node in program.step.graph.nodes:
        for site in _sites(program, kinds, order, node):
            found = site if isinstance(site, str) else _read(program, kinds, site, {})
            if isinstance(found, str):
                return f"{node.name}: {found}"
    return None


def _sites(
    program: Program, kinds: Kinds, order: dict[fx.Node, int], node: fx.Node
) -> list[_Site | str]:
    """The attentions that this operator is the heart of, or why they cannot be read."""
    if node.op != "call_function" or kinds.get(node) != "data":
        return []
    if node.target is aten.scaled_dot_product_attention.default:
        return [_fused(program, kinds, node)]
    if packet(node) not in (aten.softmax, aten._softmax):
        return []
    fixed = sizes(node)[-1].isdigit()  # a router's, say; only an encoder may have a fixed length
    if fixed and FEATURES not in program.step.inputs:
        return []
    found = find_written(node, kinds, order)
    if isinstance(found, str):
        return [] if fixed else [found]
    return [_written(program, kinds, order, w) for w in found]


def _fused(program: Program, kinds: Kinds, node: fx.Node) -> _Site | str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    heads = [as_heads(program, kinds, given[n]) for n in names[:3]]
    if wrong := [h for h in heads if isinstance(h, str)]:
        return wrong[0]
    q, k, v = (h for h in heads if isinstance(h, fx.Node))
    scale, mask = given.get("scale"), given.get("attn_mask")
    scale = 1 / math.sqrt(int(sizes(q)[3])) if scale is None else float(scale)
    site = _Site(node, q, k, v, scale, causal=bool(given.get("is_causal", False)))
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        site.hide.append((mask, False))
    elif mask is not None:
        site.add.append(mask)
    site.key = (tuple(site.hide), tuple(site.add), site.causal)
    return site


def _written(
    program: Program, kinds: Kinds, order: dict[fx.Node, int], written: Written
) -> _Site | str:
    scale, sink = read_scale(program, written), read_sink(program, written)
    if isinstance(scale, str) or isinstance(sink, str):
        return scale if isinstance(scale, str) else str(sink)
    heads = [as_heads(program, kinds, n) for n in (written.q, written.keys, written.v)]
    if wrong := [h for h in heads if isinstance(h, str)]:
        return wrong[0]
    q, keys, v = (h for h in heads if isinstance(h, fx.Node))
    site = _Site(written.result, q, swapped(program, keys), v, *scale, sink=sink, written=written)
    site.key = region_key(written, kinds, order)
    return site


def _holds(program: Program, site: _Site, mask_class: Class) -> bool:
    """Whether the attention as read gives what is written, on random queries, keys and values."""
    assert site.written is not None
    length = min(11, program.facts.max_context)
    generator = torch.Generator().manual_seed(0)
    nodes = (site.written.q, site.written.keys, site.written.v)
    given = {
        n: torch.randn(concrete(program, n, 2, length), generator=generator)
        for n in dict.fromkeys(nodes)
    }
    want = try_out(program, site.result, given, torch.arange(length).repeat(2, 1))
    q, keys, v = (given[n].reshape(2, -1, *given[n].shape[-2:]) for n in nodes)
    q_pos, k_pos = (torch.arange(n).repeat(2, 1) for n in (q.shape[2], v.shape[2]))
    got = attention(
        q, keys.transpose(2, 3), v, q_pos, k_pos,
        None if mask_class.bias is None else mask_class.bias.expand(q.shape[1], *mask_class.bias.shape[1:]),
        site.scale, site.softcap, mask_class.mask.kind, mask_class.mask.size, site.sink,
    )  # fmt: skip
    return close(got.reshape(want.shape), want)


def _read(
    program: Program, kinds: Kinds, site: _Site, masks: dict[Hashable, Class | str]
) -> Class | str:
    """The mask of a site, or why it cannot be read; `masks`: those that were read, by the site's key."""
    if site.key not in masks:
        masks[site.key] = _mask_of(program, kinds, site)
    found = masks[site.key]
    if isinstance(found, Class) and site.written and not _holds(program, site, found):
        return "an operation on its scores is not a scale, soft cap, mask or bias"
    return found


def _mask_of(program: Program, kinds: Kinds, site: _Site) -> Class | str:
    nodes = [*(n for n, _ in site.hide), *site.add]
    bad = next((n for n in nodes if kinds[n] == "data"), None)
    if bad in site.add:
        return (
            f"it adds {bad.name} to its scores, a bias that is computed of the tokens' own vectors; "
            "accel adds a bias by position only"
        )
    if bad is not None:
        return f"its mask {bad.name} depends on the tokens; accel hides keys by position only"
    if site.causal and not nodes:
        return Class(Mask("causal"))
    if shows_padding(program, site.k, lambda positions: _matrices(program, site, positions)[0]):
        return "its mask shows the padding of the encoder's input"
    stop: set[fx.Node] = set()
    if site.written:
        nodes, stop = [site.written.scores], {site.written.product}
    length, longest = telling_length(program, nodes, stop), reach(program, site.k)
    for size in dict.fromkeys((length, longest if longest <= DENSE_LIMIT else length)):
        found = classify(
            *_matrices(program, site, torch.arange(size)[None]),
            longest,
            nodes[0].name if nodes else "none",
            site.sink is not None,
        )
        if isinstance(found, Class):
            return found
    return found


def _matrices(program: Program, site: _Site, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """visible [h,T,T] and added [h,T,T] of a site, for one sequence of these positions [1,T]."""
    size = positions.shape[1]
    if site.written:
        added = scores_at(program, site.written, 0.0, positions).float()
        if added.shape[1:] == (size, size):
            return added > HIDDEN, added
        if bool((added != added[0, 0, 0]).any()):
            raise PassError(f"{site.result.name} masks some of a fixed number of keys")
        return torch.ones(1, size, size, dtype=torch.bool), None
    values = [
        v.expand(torch.broadcast_shapes(v.shape, (1, size, size))).reshape(-1, size, size)
        for v in evaluate_mask(program, [*(n for n, _ in site.hide), *site.add], positions)
    ]
    visible = torch.ones(1, size, size, dtype=torch.bool)
    if site.causal:
        visible = visible.tril()
    for (_, hides), value in zip(site.hide, values, strict=False):
        visible = visible & (value.bool() != hides)
    total: Tensor | None = None
    for value in values[len(site.hide) :]:
        visible = visible & (value.float() > HIDDEN)
        total = value.float() if total is None else total + value.float()
    if total is not None:
        visible, total = torch.broadcast_tensors(visible, total)
    return visible, total


def ungroup(program: Program, node: fx.Node) -> fx.Node:
    """The [B,G,S,D] value that was repeated to [B,H,S,D], or the value itself."""
    heads, width = int(sizes(node)[1]), int(sizes(node)[3])
    here = node
    while packet(here) in _GROUPING and isinstance(here.args[0], fx.Node):
        here = here.args[0]
        shape = sizes(here)
        if len(shape) != 4 or shape[3] != str(width):
            continue
        axis = 1 if shape[1].isdigit() else 2  # of the heads
        if not shape[axis].isdigit() or shape[axis] == str(heads) or heads % int(shape[axis]):
            continue
        x = torch.randn(2, int(shape[axis]), 3, width, generator=torch.Generator().manual_seed(0))
        given = {here: x if axis == 1 else x.transpose(1, 2)}
        out = try_out(program, node, given, torch.arange(3).repeat(2, 1))
        if not close(out, x.repeat_interleave(heads // x.shape[1], dim=1), 0.0):
            continue
        if axis == 1:
            return here
        editor = Editor(program, here.graph)
        with here.graph.inserting_after(here):
            return editor.call(aten.transpose.int, here, 1, 2, like=here)
    return node


def _same_bias(program: Program, bias: Tensor) -> int:
    """The number of an equal bias table, or a new number."""
    number = 0
    while f"bias.{number}" in program.params:
        known = program.params[f"bias.{number}"]
        if known.shape == bias.shape and torch.equal(known, bias):
            return number
        number += 1
    return number
