"""Graphs of a program: entries, which are called from outside, and regions, which are called as one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx


@dataclass(eq=False)
class Region:
    """A sub-graph called as one node: a layer. Its placeholders are the call's arguments in order."""

    name: str
    graph: fx.Graph

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.name} is run by Program.run, which holds its parameters")


@dataclass(eq=False)
class Conditional(Region):
    """A region that may be left out: its first argument, a bool [], says whether `graph` runs, or
    `otherwise`, which takes and gives the same.
    """

    otherwise: fx.Graph


@dataclass
class Entry:
    """One callable graph. Placeholders carry the input names; `outputs` names what it returns, in order.

    defaults: values of the inputs that a caller may leave out.
    """

    graph: fx.Graph
    outputs: list[str]
    defaults: dict[str, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> list[str]:
        return [str(n.target) for n in self.graph.find_nodes(op="placeholder")]

    def input(self, name: str) -> fx.Node:
        """The placeholder of an input."""
        holders: list[fx.Node] = list(self.graph.find_nodes(op="placeholder"))
        return next(n for n in holders if n.target == name)

    def output_nodes(self) -> dict[str, fx.Node]:
        (out,) = self.graph.find_nodes(op="output")
        values = out.args[0]
        assert isinstance(values, (tuple, list))
        return dict(zip(self.outputs, values, strict=True))

    def set_outputs(self, values: Mapping[str, fx.Node]) -> None:
        """Return these values, under these names, from now on."""
        (out,) = self.graph.find_nodes(op="output")
        out.args = (tuple(values.values()),)
        self.outputs = list(values)


LAYER = "layer."  # what regions that are layers are called, before their number


def layer_calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of a graph's layers, in order; of other regions, one value is computed in one way or another."""
    calls = (n for n in graph.nodes if isinstance(n.target, Region))
    return [n for n in calls if n.target.name.startswith(LAYER)]


def graphs_of(region: Region) -> list[fx.Graph]:
    """The graphs of which a call of the region runs one."""
    return [region.graph, *([region.otherwise] if isinstance(region, Conditional) else [])]


def sizes(node: fx.Node) -> list[str]:
    """The axes of a value as text: numbers, or the symbol of a symbolic size."""
    return [str(d) for d in node.meta["val"].shape]
