"""Attention in its exported forms becomes one operator with explicit positions and a named mask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import Mask, attention
from accel.ir.ops.recurrence import RECURRENT
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean, replace
from accel.passes.recognise.mask import (
    DENSE_LIMIT,
    HIDDEN,
    Class,
    classify,
    evaluate_mask,
    telling_length,
)
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.region import Kinds, close, packet, sizes, try_out
from accel.passes.recognise.scores import Found, read_scores
from accel.passes.recognise.sides import positions_of, reach, shows_padding

aten = torch.ops.aten
_GROUPING = {
    getattr(aten, n)
    for n in "clone view reshape _unsafe_view expand unsqueeze repeat_interleave contiguous".split()
}


@dataclass
class _Site:
    """One attention, read: where its result is, and its operands."""

    result: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    softcap: float
    hide: list[tuple[fx.Node, bool]]
    add: list[tuple[fx.Node, float]]
    causal: bool = False


@dataclass(frozen=True)
class Attention(Pass):
    """scaled_dot_product_attention, or softmax(q kᵀ + mask) v written out  ->  accel.attention.

    The mask is evaluated on one sequence and named (causal, window, chunk, full, plus a bias by
    distance); KV heads that were repeated for the product are read unrepeated.
    """

    after = (Clean, Positions)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds = Kinds(graph)
        masks: dict[Any, Class | str] = {}
        for node in list(graph.nodes):
            site = self._site(program, kinds, node)
            if isinstance(site, str):
                if site:
                    report.refused.append(f"{node.name}: {site}")
                continue
            key = (tuple(site.hide), tuple(site.add), site.causal)
            if key not in masks:
                masks[key] = _mask_of(program, kinds, site)
            found = masks[key]
            if isinstance(found, str):
                report.refused.append(f"{node.name}: {found}")
                continue
            self._rewrite(program, site, found)
            report.changed += 1
        if not report.changed and not program.nodes(*RECURRENT):
            nearest = (report.refused or ["no candidate in the graph"])[0]
            raise PassError(f"Attention changed nothing. Nearest miss: {nearest}")
        Clean().run(program)
        return report

    def _site(self, program: Program, kinds: Kinds, node: fx.Node) -> _Site | str:
        if node.op != "call_function" or kinds.get(node) != "data":
            return ""
        if node.target is aten.scaled_dot_product_attention.default:
            return _fused(node)
        if packet(node) in (aten.softmax, aten._softmax) and len(sizes(node)) == 4:
            return _written_out(program, kinds, node)
        return ""

    def _rewrite(self, program: Program, site: _Site, found: Class) -> None:
        graph = program.step.graph
        editor = Editor(program, graph)
        q_pos, k_pos = (positions_of(program, sizes(n)[2]) for n in (site.q, site.k))
        k, v = ungroup(program, site.k), ungroup(program, site.v)
        if sizes(k)[1] != sizes(v)[1]:
            k, v = site.k, site.v
        bias = None
        with graph.inserting_before(site.result):
            if found.bias is not None:
                heads = int(sizes(site.q)[1])
                full = found.bias.expand(heads, *found.bias.shape[1:]).contiguous()
                bias = editor.param(f"bias.{_same_bias(program, full)}", full)
            new = editor.call(
                attention.default, site.q, k, v, q_pos, k_pos, bias,
                site.scale, site.softcap, found.mask.kind, found.mask.size, like=site.result,
            )  # fmt: skip
        replace(site.result, new)


def _fused(node: fx.Node) -> _Site | str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if len(sizes(q)) != 4:
        return f"attention over {len(sizes(q))} axes, not [B,H,T,D]"
    scale = given.get("scale")
    scale = 1 / math.sqrt(int(sizes(q)[3])) if scale is None else float(scale)
    hide, add = [], []
    if mask is not None:
        if mask.meta["val"].dtype == torch.bool:
            hide.append((mask, False))
        else:
            add.append((mask, 1.0))
    return _Site(node, q, k, v, scale, 0.0, hide, add, bool(given.get("is_causal", False)))


def _written_out(program: Program, kinds: Kinds, node: fx.Node) -> _Site | str:
    if node.args[1] not in (-1, 3):
        return f"a softmax over axis {node.args[1]}"
    result = node
    while len(result.users) == 1:
        user = next(iter(result.users))
        if packet(user) in (aten._to_copy, aten.to, aten.clone, aten.dropout):
            result = user
            continue
        if packet(user) in (aten.matmul, aten.bmm) and user.args[0] is result:
            break
        return f"{user.name} stands between the softmax and the product with v"
    else:
        return "" if not result.users else "the probabilities are used more than once"
    found = read_scores(node, kinds, program.params)
    if not isinstance(found, Found):
        return found
    values = user.args[1]
    assert isinstance(values, fx.Node)
    if len(sizes(found.q)) != 4 or len(sizes(values)) != 4:
        return "q·kᵀ is not over [B,H,T,D]"
    k = _transposed(program, found.keys)
    return _Site(user, found.q, k, values, found.scale, found.softcap, found.hide, found.add)


def _transposed(program: Program, keys: fx.Node) -> fx.Node:
    """[B,H,D,S] -> [B,H,S,D], without a second transpose where the node is one."""
    if keys.target is aten.transpose.int and {a % 4 for a in keys.args[1:]} == {2, 3}:  # type: ignore[operator]
        assert isinstance(keys.args[0], fx.Node)
        return keys.args[0]
    editor = Editor(program, keys.graph)
    with keys.graph.inserting_after(keys):
        return editor.call(aten.transpose.int, keys, 2, 3, like=keys)


def _mask_of(program: Program, kinds: Kinds, site: _Site) -> Class | str:
    nodes = [n for n, _ in (*site.hide, *site.add)]
    bad = [n.name for n in nodes if kinds[n] == "data"]
    if bad:
        return f"its mask {bad[0]} depends on the tokens"
    if site.causal and not nodes:
        return Class(Mask("causal"))
    if shows_padding(program, site.k, site.hide, site.add):
        return "its mask shows the padding of the encoder's input"
    length, longest = telling_length(program, nodes), reach(program, site.k)
    for size in dict.fromkeys((length, longest if longest <= DENSE_LIMIT else length)):
        found = classify(
            *_matrices(program, site, nodes, size),
            longest,
            nodes[0].name if nodes else "none",
        )
        if isinstance(found, Class):
            return found
    return found


def _matrices(
    program: Program, site: _Site, nodes: list[fx.Node], size: int
) -> tuple[Tensor, Tensor | None]:
    """visible [h,T,T] and added [h,T,T] of a site, for one sequence of `size` tokens."""
    values = [
        v.reshape(-1, *v.shape[-2:]).expand(-1, size, size)
        for v in evaluate_mask(program, nodes, size)
    ]
    visible = torch.ones(1, size, size, dtype=torch.bool)
    if site.causal:
        visible = visible.tril()
    for (_, hides), value in zip(site.hide, values, strict=False):
        visible = visible & (value.bool() != hides)
    added: Tensor | None = None
    for (_, factor), value in zip(site.add, values[len(site.hide) :], strict=True):
        term = value.float() * factor
        visible = visible & (term > HIDDEN)
        added = term if added is None else added + term
    if added is not None:
        visible, added = torch.broadcast_tensors(visible, added)
    return visible, added


def ungroup(program: Program, node: fx.Node) -> fx.Node:
    """The [B,G,S,D] value that was repeated to [B,H,S,D], or the value itself."""
    heads, width = int(sizes(node)[1]), int(sizes(node)[3])
    here = node
    while packet(here) in _GROUPING and isinstance(here.args[0], fx.Node):
        here = here.args[0]
        shape = sizes(here)
        if len(shape) != 4 or shape[1] == str(heads) or not shape[1].isdigit():
            continue
        groups = int(shape[1])
        if shape[3] != str(width) or heads % groups:
            continue
        x = torch.randn(2, groups, 3, width, generator=torch.Generator().manual_seed(0))
        out = try_out(program, node, {here: x}, torch.arange(3).repeat(2, 1))
        if close(out, x.repeat_interleave(heads // groups, dim=1), 0.0):
            return here
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
