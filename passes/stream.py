"""The residual stream of a text, layer by layer: what runs all layers, or some, without building a model of each
choice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.program import Program, ValueOf, compute, evaluate
from accel.ir.region import Region
from accel.passes.calibrate import feeds


class Stream:
    """The stream of rows of one text, tokens [n,T], through the layers of a program's step, `calls`.

    start: the stream [n,T,E] before the first layer. What layers take beside it (masks, positions, empty caches) is
    computed once. value_of: what computes the nodes of layers and of the head. replaced: values of nodes that layers
    take, in place of the program's.
    """

    def __init__(
        self,
        program: Program,
        calls: Sequence[fx.Node],
        tokens: Tensor,
        value_of: ValueOf = compute,
        replaced: Mapping[fx.Node, Tensor] | None = None,
    ):
        self.params: Mapping[str, Tensor] = program.params
        self.calls, self.tokens = calls, tokens
        self._value_of = value_of
        self._inputs = feeds(program, "step", tokens)
        self._logits = program.step.output_nodes()["logits"]
        self._end = stream_after(calls[-1])
        inputs = dict.fromkeys(a for call in calls for a in call.all_input_nodes)
        others = [a for a in inputs if a not in map(stream_after, calls)]
        with torch.no_grad():
            values = evaluate(others, self.params, self._inputs)
        self._values = {**dict(zip(others, values, strict=True)), **(replaced or {})}
        self.start: Tensor = self._values[_before(calls[0])]

    def layer(
        self,
        index: int,
        x: Tensor,
        params: Mapping[str, Tensor] | None = None,
        replaced: Mapping[fx.Node, Tensor] | None = None,
    ) -> Tensor:
        """The stream behind a layer, of x [n,T,E] before it. params, replaced: in place of the program's, and of what
        layers take.
        """
        call = self.calls[index]
        values = {**self._values, **(replaced or {}), _before(call): x}
        out: Tensor = self._value_of(call, params or self.params, self._inputs, values)[0]
        return out

    def inside(
        self,
        index: int,
        x: Tensor,
        nodes: Sequence[fx.Node],
        known: Mapping[fx.Node, Tensor] | None = None,
    ) -> list[Tensor]:
        """Values of nodes of a layer's own graph, of x [n,T,E] before it, where some are `known` to be others."""
        call = self.calls[index]
        region = call.target
        assert isinstance(region, Region)
        values = {**self._values, _before(call): x}
        names = [str(h.target) for h in region.graph.find_nodes(op="placeholder")]
        arguments = map_arg(call.args, values.__getitem__)
        inputs = dict(zip(names, arguments, strict=True))
        return evaluate(nodes, self.params, inputs, known or {}, self._value_of)

    def without(self, index: int, x: Tensor, off: Sequence[fx.Node]) -> Tensor:
        """The stream behind a layer in whose graph some nodes, of the stream's size, are 0; x [n,T,E] is before it."""
        call = self.calls[index]
        region = call.target
        assert isinstance(region, Region)
        (out,) = region.graph.find_nodes(op="output")
        return self.inside(index, x, [out.args[0][0]], dict.fromkeys(off, torch.zeros_like(x)))[0]

    def changed(
        self,
        index: int,
        x: Tensor,
        sites: Sequence[tuple[Any, fx.Node, fx.Node]],
        change: Callable[[Any, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The stream behind a layer of which some terms are others. sites: in order, what to call a term by, the node
        of the stream before it, and its own. change: makes of that, the stream there [n,T,E] and the term the other.
        """
        known: dict[fx.Node, Tensor] = {}
        for site, before, node in sites:
            stream, value = self.inside(index, x, [before, node], known)
            known[node] = change(site, stream, value)
        region = self.calls[index].target
        assert isinstance(region, Region)
        (out,) = region.graph.find_nodes(op="output")
        return self.inside(index, x, [out.args[0][0]], known)[0]

    def logits(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """[n,N,V], of the stream [n,T,E] behind the last layer, at columns [N]; none: at all, [n,T,V]."""
        known, inputs = {**self._values, self._end: x}, self._inputs
        if columns is not None:
            inputs = {**inputs, "rows": columns.expand(len(x), -1)}
        found: list[Tensor] = evaluate([self._logits], self.params, inputs, known, self._value_of)
        return found[0]

    def losses(self, x: Tensor) -> Tensor:
        """Of each row the sum of the negative log-likelihood of its tokens behind the first, float64 [n]."""
        odds = self.logits(x)[:, :-1].float().flatten(0, 1)
        targets = self.tokens[:, 1:]
        loss = F.cross_entropy(odds, targets.flatten(), reduction="none").view(targets.shape)
        return loss.double().sum(1)


def stream_after(call: fx.Node) -> fx.Node:
    """The residual stream behind a layer."""
    return next(u for u in call.users if u.target is operator.getitem and u.args[1] == 0)


def _before(call: fx.Node) -> fx.Node:
    before = call.args[0]
    assert isinstance(before, fx.Node)
    return before
