"""The branches of a layer: what its attention, and what its MLP, adds to the residual stream."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.norm import add_layer_norm, add_rms_norm
from accel.ir.program import Program, ancestors
from accel.ir.region import Region, sizes
from accel.ir.state import state_of

aten = torch.ops.aten
_ADD_NORMS = {add_rms_norm.default, add_layer_norm.default}


@dataclass(frozen=True)
class Term:
    """One value [B,T,E] that a sum adds to the residual stream: operand `place` of `total`."""

    total: fx.Node
    place: int

    @property
    def value(self) -> fx.Node:
        value = self.total.args[self.place]
        assert isinstance(value, fx.Node)
        return value

    @property
    def carried(self) -> fx.Node:
        """What it is added to."""
        return _node(self.total.args[1 - self.place])


@dataclass(frozen=True)
class Branches:
    """What a layer adds. `results`: what its graph outputs after the stream, with the state that it is the next of."""

    graph: fx.Graph
    attention: list[Term]
    mlp: list[Term]
    results: dict[fx.Node, str]

    @property
    def stream(self) -> fx.Node:
        """The residual stream before the layer."""
        first: fx.Node = self.graph.find_nodes(op="placeholder")[0]
        return first

    def written(self, term: Term) -> list[fx.Node]:
        """The state that goes with a term of attention: what it reads, or else what no term reads, with the first."""
        reads = [ancestors([t.value], set()) for t in self.attention]
        places = {n: next((i for i, r in enumerate(reads) if n in r), 0) for n in self.results}
        mine = self.attention.index(term) if term in self.attention else -1
        return [n for n, place in places.items() if place == mine]

    def before(self, term: Term) -> fx.Node:
        """The stream that a term is added to; of attention and MLP side by side that before both."""
        others = (t for t in (*self.attention, *self.mlp) if t is not term)
        return self.stream if any(t.total is term.total for t in others) else term.carried

    def parts(self, terms: list[Term]) -> list[tuple[Term, list[fx.Node]]]:
        """Each term with its members."""
        return [(term, self.members(term)) for term in terms]

    def members(self, term: Term) -> list[fx.Node]:
        """The nodes that only this term, and the state that goes with it, need; in order."""
        totals = {t.total for t in (*self.attention, *self.mlp)}
        ends = {term.value, *self.written(term)}
        inside = ancestors(ends, stop={self.stream, *totals}) - {self.stream} - totals
        inside = {n for n in inside if n.op == "call_function"}
        others = [n for n in self.graph.nodes if n.op == "call_function" and n not in inside]
        needed = ancestors((p for n in others for p in n.all_input_nodes), stop=ends)
        return [n for n in self.graph.nodes if n in inside and (n in ends or n not in needed)]


def branches(program: Program, call: fx.Node, mlp: bool = True) -> Branches:
    """Those of a layer's call; `mlp`: one of them has to be an MLP. Raises PassError where the layer is not a sum of
    what attention and an MLP add.
    """
    region = call.target
    assert isinstance(region, Region)
    (out,) = region.graph.find_nodes(op="output")
    stream, *others = out.args[0]
    results = {n: state_name(program, call, i) for i, n in enumerate(others, 1)}
    first, *others = region.graph.find_nodes(op="placeholder")
    terms = _terms(stream, first) or []
    state = {s.name for s in program.state}
    caches = {n for n in others if str(n.target) in state}
    found = Branches(region.graph, [], [], results)

    def reads(term: Term) -> bool:
        return bool(caches & ancestors([term.value], stop={first, *(t.total for t in terms)}))

    for term in terms:
        for part in _parts(term, reads):
            (found.attention if reads(part) else found.mlp).append(part)
    if not found.attention or (mlp and not found.mlp):
        raise PassError(
            f"depth: {region.name} is no sum of its input, an attention branch and an MLP branch, so that its branches "
            "cannot be skipped; choose a method that skips whole layers, such as unified-skip"
        )
    return found


def _terms(node: fx.Node, stream: fx.Node) -> list[Term] | None:
    """What is added to the stream until `node`, in order; none where `node` is no such sum."""
    if node is stream:
        return []
    total = node
    if node.target is operator.getitem and node.args[1] == 1:
        total = _node(node.args[0])
        if total.target not in _ADD_NORMS:
            return None
    elif node.target is not aten.add.Tensor or "alpha" in node.kwargs:
        return None
    for place in (0, 1):
        carried, term = total.args[place], total.args[1 - place]
        if isinstance(carried, fx.Node) and isinstance(term, fx.Node) and _alike(carried, stream):
            before = _terms(carried, stream)
            if before is not None and term.op == "call_function" and _alike(term, stream):
                return [*before, Term(total, 1 - place)]
    return None


def _parts(term: Term, reads: Callable[[Term], bool]) -> list[Term]:
    """Attention and MLP side by side are one term, (a + m): the two of them."""
    both: Any = term.value
    if reads(term) and both.target is aten.add.Tensor:
        parts = [Term(both, i) for i in (0, 1) if isinstance(both.args[i], fx.Node)]
        if [reads(p) and _alike(p.value, both) for p in parts].count(True) == 1 == len(parts) - 1:
            return parts
    return [term]


def state_name(program: Program, call: fx.Node, index: int) -> str:
    """The state value that a result of a layer is the next of; "" for the residual stream."""
    items = [u for u in call.users if u.target is operator.getitem and u.args[1] == index]
    names = [n for n, node in program.step.output_nodes().items() if node in items]
    return state_of(names[0]) if names else ""


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return sizes(a) == sizes(b) and a.meta["val"].dtype == b.meta["val"].dtype


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
