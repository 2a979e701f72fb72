"""Where the graph can be cut: values that every path from tokens to logits passes."""

from __future__ import annotations

import bisect
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.recurrence import RECURRENT
from accel.ir.program import Program, ancestors
from accel.passes.recognise.region import Kinds, numbering

MIXERS: set[Any] = {attention.default, *RECURRENT}  # where one token's result depends on others


def mixers(graph: fx.Graph) -> list[fx.Node]:
    """The attentions and recurrences over the sequence's own tokens; not those over an encoder's."""
    return [
        n
        for n in graph.nodes
        if n.target in MIXERS and "cross.pos" not in [a.target for a in n.all_input_nodes]
    ]


def borrowed(graph: fx.Graph) -> set[tuple[fx.Node, fx.Node]]:
    """(keys or values, attention) where an attention before it reads them too: that one's layer has
    them in its cache, and the later layer reads them there. (pages, attention): a list may come from another layer,
    or from what another layer says of its tokens.
    """
    owned: set[fx.Node] = set()
    found: set[tuple[fx.Node, fx.Node]] = set()
    for node in mixers(graph):
        if node.target is attention.default:
            read = {operands_of(node).k, operands_of(node).v}
            found |= {(n, node) for n in read & owned}
            owned |= read
            pages = operands_of(node).pages
            if isinstance(pages, fx.Node):
                found.add((pages, node))
    return found


def parted(graph: fx.Graph) -> list[fx.Node]:
    """What tokens give to every layer beside the stream, a part for each: values that no token mixer comes before, and
    of which each user takes another part.
    """
    found, behind = list[fx.Node](), set(mixers(graph))
    for node in graph.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        parts = [n.args[1:] for n in node.users if n.target is torch.ops.aten.select.int]
        if node not in behind and 1 < len(parts) == len(node.users) == len(set(parts)):
            found.append(node)
    return found


def cut_points(program: Program) -> list[fx.Node]:
    """The values that every path from tokens to logits passes, in order; not counting those from
    one layer's keys and values to another that shares them, lists of pages, and what is `parted`.
    """
    tokens, logits = program.step.input("tokens"), program.step.output_nodes()["logits"]
    below = ancestors([logits], set())
    flow = nx.DiGraph()
    reached = {tokens}
    kinds = Kinds(program.step.graph)
    shared = borrowed(program.step.graph)
    shared |= {(node, user) for node in parted(program.step.graph) for user in node.users}
    for node in program.step.graph.nodes:
        if (
            node in below
            and isinstance(node.meta.get("val"), (Tensor, tuple, list))
            and kinds[node] == "data"
        ):
            for parent in node.all_input_nodes:
                if parent in reached and (parent, node) not in shared:
                    flow.add_edge(parent, node)
                    reached.add(node)
    if logits not in flow:
        return []
    parent = nx.immediate_dominators(flow, tokens)
    chain = [logits]
    while chain[-1] is not tokens:
        chain.append(parent[chain[-1]])
    return chain[::-1]


def layer_groups(program: Program) -> list[list[fx.Node]]:
    """The attentions and recurrences in order, those of one layer together.

    A layer ends where a cut lies between two of them, and where a kind comes back after another
    one (a model that hands its embeddings whole to every layer has no cuts).
    """
    order = numbering(program.step.graph)
    cuts = [order[c] for c in cut_points(program) if c in order]
    groups: list[list[fx.Node]] = []
    last = -1
    for site in mixers(program.step.graph):
        place = bisect.bisect(cuts, order[site])
        kinds = [n.target for n in groups[-1]] if groups else []
        again = site.target in kinds and (
            kinds[-1] is not site.target or site.target is attention.default
        )
        if place != last or again:
            groups.append([])
        groups[-1].append(site)
        last = place
    return groups
