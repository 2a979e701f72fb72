"""Projections of one value become one product: q, k and v; gate and up."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.clean.clean import forget_unused
from accel.passes.recognise.experts import routes
from accel.passes.recognise.linear import Linears
from accel.passes.state.head import Head

aten = torch.ops.aten


@dataclass(frozen=True)
class Pack(Pass):
    """linear(x, a), linear(x, b), …  ->  the parts of one linear(x, [a; b; …]).

    Packed are the projections of one module (by the names of their weights) that nothing else
    reads. A router stays apart, whose few rows are wanted exact by what quantises the others; so do weights
    that a checkpoint holds in codes of another layout.

    Before and after: `tests/passes/texts/pack.before.txt`, `pack.after.txt`.
    """

    after = (Linears, Head)

    def run(self, program: Program) -> Report:
        report = Report()
        uses = Counter(
            str(n.target)
            for g in program.graphs()
            for n in g.find_nodes(op="get_attr")
            for _ in n.users
        )
        tied = {
            str(weight.target)
            for node in program.nodes(aten.embedding.default)
            if isinstance(weight := operand_of(node, "weight"), fx.Node)
        }
        for graph in program.graphs():
            groups: dict[tuple[object, ...], list[fx.Node]] = {}
            for node in graph.find_nodes(op="call_function", target=aten.linear.default):
                why = _apart(node, uses, tied)
                if why:
                    report.refused.append(f"{node.name}: {why}")
                else:
                    x, weight = node.args[:2]
                    name = str(weight.target)
                    layout = program.params.stored(name).layout
                    alike = (x, _owner(name), weight.meta["val"].dtype, layout)
                    groups.setdefault(alike, []).append(node)
            for group in groups.values():
                if len(group) > 1:
                    _pack(program, graph, group)
                    report.changed += 1
        if report.changed:
            forget_unused(program)
        return report


def _apart(node: fx.Node, uses: Counter[str], tied: set[str]) -> str:
    """Why a projection stays as it is; empty where it may be packed."""
    weight, bias = operand_of(node, "weight"), operand_of(node, "bias")
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return "its weight is computed"
    if uses[str(weight.target)] > 1:
        if str(weight.target) in tied:
            return f"{weight.target} is the embedding too (tied), which reads it as it is"
        return f"{weight.target} is used elsewhere too"
    if isinstance(bias, fx.Node) and (
        bias.op != "get_attr" or bias.meta["val"].shape != weight.meta["val"].shape[:1]
    ):
        return "its bias is computed"
    if routes(node):
        return "it belongs to a mixture of experts"
    return ""


def _owner(name: str) -> str:
    """The module that a projection belongs to, out of its weight's name."""
    return name.split(".weight")[0].rpartition(".")[0]


def _pack(program: Program, graph: fx.Graph, group: list[fx.Node]) -> None:
    """One product in place of several, and its parts in place of theirs."""
    editor = Editor(program, graph)
    x, names = group[0].args[0], [str(_node(n.args[1]).target) for n in group]
    counts = [int(n.meta["val"].shape[-1]) for n in group]
    biases = [operand_of(n, "bias") for n in group]
    with graph.inserting_before(group[0]):
        weights = [editor.stacked(joined(names), names)]
        if any(biases):
            dtype = next(b.meta["val"].dtype for b in biases if isinstance(b, fx.Node))
            parts: list[str | Tensor] = [
                str(b.target) if isinstance(b, fx.Node) else torch.zeros(n, dtype=dtype)
                for b, n in zip(biases, counts, strict=True)
            ]
            weights.append(editor.stacked(f"{joined(names)}.bias", parts))
        packed = editor.call(aten.linear.default, x, *weights, like=group[0])
        split = editor.call(aten.split_with_sizes.default, packed, counts, -1, like=group[0])
        for i, node in enumerate(group):
            part = editor.call(operator.getitem, split, i, like=node)
            node.replace_all_uses_with(part)
    for node in group:
        graph.erase_node(node)
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)


def joined(names: list[str]) -> str:
    """One name for several that begin and end alike: `a.{q,k,v}.weight`."""
    parts = [n.split(".") for n in names]
    head = 0
    while all(len(p) > head + 1 and p[head] == parts[0][head] for p in parts):
        head += 1
    tail = 0
    while all(len(p) > head + tail + 1 and p[-1 - tail] == parts[0][-1 - tail] for p in parts):
        tail += 1
    middle = ",".join(".".join(p[head : len(p) - tail]) for p in parts)
    return ".".join([*parts[0][:head], f"{{{middle}}}", *parts[0][len(parts[0]) - tail :]])


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
