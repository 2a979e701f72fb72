"""A program while its layers get their lists of pages: the graphs that make them, and who may read whose."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from accel.ir.ops.attention import Operands, operands_of
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, sizes
from accel.ir.state import POSITIONS, output_of
from accel.ir.trace import trace
from accel.passes.clean.clean import remove_dead
from accel.passes.trained import Parts


@dataclass
class Build:
    """A program while its layers get their lists.

    chooses: whether this call chooses. tables: the constants of each layer. layers: those that choose. lists: layer ->
    its attention, its list. shared: what a method makes once for all layers.
    """

    program: Program
    chooses: fx.Node
    letters: dict[str, Any]
    tables: Parts
    outputs: dict[str, fx.Node]
    layers: tuple[int, ...]
    lists: dict[int, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


def other_list(build: Build | None, node: fx.Node, layer: int) -> str:
    """Why an attention cannot read the list that a layer chose; nothing where it can."""
    if build is None or layer not in build.lists:
        return f"layer {layer}, whose list it would read, chooses none"
    x, y = operands_of(node), operands_of(build.lists[layer][0])
    if (x.mask, x.window, x.k_pos) != (y.mask, y.window, y.k_pos):
        return f"it sees other tokens than layer {layer}, whose list it would read"
    if sizes(x.k)[1] != sizes(y.k)[1]:
        return f"it has other KV heads than layer {layer}, whose list it would read"
    return ""


def graph_of(
    program: Program,
    layer: int,
    function: Callable[..., Any],
    given: tuple[fx.Node, ...],
    key: Any,
    table: Mapping[str, Tensor] | None = None,
) -> fx.Graph:
    """What a function does with operands, the first (a condition) left out, and with parameters of its own."""
    graph = fx.Graph()
    holders = []
    for i, node in enumerate(given):
        holders.append(graph.placeholder(str(node.target) if node.op == "placeholder" else f"x{i}"))
        holders[-1].meta["val"] = node.meta["val"]
    editor = Editor(program, graph)
    operands = *holders[1:], *(editor.param(*one) for one in (table or {}).items())
    found = trace(editor, f"pages.{layer}", function, *operands, key=key)
    graph.output(found if isinstance(found, tuple) else (found,))
    remove_dead(graph)  # what a vote did not ask for
    return graph


def region_call(
    editor: Editor, region: Conditional, given: tuple[fx.Node, ...], like: fx.Node
) -> list[fx.Node]:
    """What a call of the region gives."""
    call = editor.graph.call_function(region, given)
    (out,) = region.graph.find_nodes(op="output")
    call.meta |= {"val": tuple(v.meta["val"] for v in out.args[0]), "layer": like.meta["layer"]}
    return [editor.call(operator.getitem, call, i, like=like) for i in range(len(out.args[0]))]


def no_list(groups: int, queries: Tensor, q_pos: Tensor, *rest: Tensor) -> Tensor:
    """No list of pages [B,G,0,1], since everything is read."""
    return q_pos.new_zeros((q_pos.shape[0], groups, 0, 1))


def reads_recent(program: Program, x: Operands[Any]) -> bool:
    """Whether it reads what steps append to `kv.pos`."""
    return isinstance(x.k_pos, fx.Node) and x.k_pos is program.step.output_nodes().get(
        output_of(POSITIONS)
    )
