"""One layer of a program as boxes and arrows: what computes, what is state; what only re-arranges is left out."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.program import Program
from accel.ir.region import Conditional, Region, layer_calls
from accel.ir.state import writes_state
from accel.ir.text import type_text

aten = torch.ops.aten
LAYOUT = {
    operator.getitem, aten.reshape.default, aten.view.default, aten.transpose.int, aten.permute.default,
    aten.split_with_sizes.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
    aten.contiguous.default, aten.clone.default, aten.sym_size.int, aten.t.default,
}  # fmt: skip
_QUIET = ("B", "T", "slots", "positions", "rows", "tree")  # arguments that every layer has
STREAM, STATE, COMPUTED, FLAG = KINDS = ("stream", "state", "computed", "flag")


@dataclass(frozen=True)
class Box:
    """One node: what it is, the type of what it gives, and the parameters that it reads."""

    label: str
    detail: str
    weights: tuple[str, ...] = ()
    kind: str = COMPUTED

    @property
    def text(self) -> str:
        return " ".join((self.label, self.detail, *self.weights))


@dataclass
class Layer:
    """Boxes in the order in which they are computed; arrows between their numbers.

    new: boxes that the other side of a comparison lacks. otherwise: what runs where the layer is left out.
    """

    name: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[tuple[int, int]] = field(default_factory=list)
    new: set[int] = field(default_factory=set)
    otherwise: Layer | None = None


def layers(program: Program) -> list[Layer]:
    """Every layer of the step; the whole step as one, where no layers were found."""
    calls = layer_calls(program.step.graph)
    regions = [n.target for n in calls if isinstance(n.target, Region)]
    if not regions:
        return [_drawn("step", program.step.graph, program)]
    found = []
    for region in regions:
        layer = _drawn(region.name, region.graph, program)
        if isinstance(region, Conditional):
            layer.otherwise = _drawn(f"{region.name}, left out", region.otherwise, program)
        found.append(layer)
    return found


def compare(before: Layer, after: Layer) -> int:
    """Mark what is new on either side, and count it."""
    a, b = ([box.text for box in side.boxes] for side in (before, after))
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            before.new |= set(range(i, j))
            after.new |= set(range(k, m))
    more = 0 if after.otherwise is None else len(after.otherwise.boxes)
    return len(before.new) + len(after.new) + more


def side_by_side(before: Layer, after: Layer) -> list[tuple[str, str, bool]]:
    """Lines of both in order, and whether they are equal; "" where one side has nothing."""
    a, b = ([box.text for box in side.boxes] for side in (before, after))
    lines = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left, right = a[i:j], b[k:m]
        for row in range(max(len(left), len(right))):
            pair = (side[row] if row < len(side) else "" for side in (left, right))
            lines.append((*pair, tag == "equal"))
    return lines  # type: ignore[return-value]


def _drawn(name: str, graph: fx.Graph, program: Program) -> Layer:
    """The boxes of a graph, without those from which nothing of it is computed."""
    layer, number = Layer(name), dict[fx.Node, int]()
    states = {s.name for s in program.state}
    for node in graph.nodes:
        box = _box(node, states, program.dims)
        if box is None:
            continue
        number[node] = len(layer.boxes)
        layer.boxes.append(box)
        sources = {s for n in _read(node) for s in _sources(n, number.__contains__)}
        layer.arrows += [(number[s], number[node]) for s in sorted(sources, key=number.__getitem__)]
    return _without_loose(layer)


def _read(node: fx.Node) -> list[fx.Node]:
    """What a node reads; of the results of a layer those that are no appended state."""
    if node.op != "output":
        return node.all_input_nodes
    return [n for n in node.all_input_nodes if n.target is not kv_append.default]


def _box(node: fx.Node, states: set[str], dims: Mapping[str, str]) -> Box | None:
    kind = type_text(node.meta.get("val"), dims)
    if node.op == "placeholder":
        name = str(node.target)
        if name in states:
            return Box(name, kind, kind=STATE)
        if name == "x":
            return Box("residual stream", kind, kind=STREAM)
        if name in _QUIET or writes_state(name):
            return None
        return Box(re.sub(r"_default(_\d+)?$", "", name), kind, kind=FLAG)
    if node.op == "output":
        return Box("out", "", kind=STREAM)
    if node.op != "call_function" or node.target in LAYOUT:
        return None
    weights = tuple(
        f"{_short(str(n.target))} {type_text(n.meta.get('val'), dims)}"
        for n in node.all_input_nodes
        if n.op == "get_attr"
    )
    return Box(_label(node) + _mask(node), kind, weights)


def _mask(node: fx.Node) -> str:
    """Of attention, what it may see."""
    if node.target is not attention.default:
        return ""
    x = operands_of(node)
    window = f" {x.window}" if x.window else ""
    return f" {x.mask}{window}" + (" + kept" if x.kept_k is not None else "")


def _label(node: fx.Node) -> str:
    if isinstance(node.target, Region):
        return node.target.name
    text = str(node.target)
    for prefix in ("aten.", "accel."):
        text = text.removeprefix(prefix)
    return text.partition(".")[0] if "." in text else getattr(node.target, "__name__", text)


def _short(parameter: str) -> str:
    """The end of a parameter's name from its module on, as q_proj.weight or q_proj.weight.int4."""
    parts = parameter.split(".")
    start = parts.index("weight") if "weight" in parts else len(parts) - 1
    return ".".join(parts[max(0, start - 1) :])


def _sources(node: fx.Node, drawn: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The drawn nodes that a value comes from, through what only re-arranges it."""
    if drawn(node):
        return [node]
    if node.op != "call_function":
        return []
    return [s for n in node.all_input_nodes for s in _sources(n, drawn)]


def _without_loose(layer: Layer) -> Layer:
    """Numbers anew, without boxes that no arrow touches: arguments that a layer passes on."""
    touched = {end for arrow in layer.arrows for end in arrow}
    stays = [i for i in range(len(layer.boxes)) if i in touched]
    number: dict[int, int] = {old: new for new, old in enumerate(stays)}
    arrows = [(number[a], number[b]) for a, b in layer.arrows]
    return Layer(layer.name, [layer.boxes[i] for i in stays], arrows)


def operators(program: Program) -> dict[str, int]:
    """How often the step calls each operator, those that only re-arrange aside."""
    counts: dict[str, int] = {}
    for node in program.nodes(entry=program.step):
        if node.target not in LAYOUT and not isinstance(node.target, Region):
            name = _label(node)
            counts[name] = counts.get(name, 0) + 1
    return counts


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any]:
    """Operators of which there are more or fewer than before: {name: (before, after)}."""
    names = dict.fromkeys([*before, *after])
    pairs = {n: (before.get(n, 0), after.get(n, 0)) for n in names}
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
