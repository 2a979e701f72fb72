"""A Program: FX graphs over shared parameters and named state, executable at every stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.fx.node import map_arg

import accel.ir.ops  # noqa: F401  (registers the dialect)
from accel.ir.calibration import Calibration
from accel.ir.errors import PassError
from accel.ir.facts import Facts
from accel.ir.region import Conditional, Entry, Region, graphs_of
from accel.ir.sizes import in_numbers
from accel.ir.state import StateValue
from accel.ir.text import program_text
from accel.ir.ties import TOPK, topk
from accel.ir.versions import shapes_in_python
from accel.ir.weights import Change, Weights

ValueOf = Callable[
    [fx.Node, Mapping[str, Tensor], Mapping[str, Any], Mapping[fx.Node, Any]], Any
]  # of a node, the parameters, the inputs and the values that are known
DTYPES = {n: getattr(torch, n) for n in ("float32", "float16", "int64", "int8", "uint8")}


class State(StateValue):
    """A value of a program's state."""

    def allocate(self, **letters: int) -> Tensor:
        """A new buffer, filled as an empty cache is; letters that are not given are 0."""
        return torch.full(in_numbers(self.shape, letters), self.fill, dtype=DTYPES[self.dtype])


@dataclass
class Program:
    """The model between capture and lowering."""

    params: Weights
    entries: dict[str, Entry]
    facts: Facts
    state: list[State] = field(default_factory=list)
    dims: dict[str, str] = field(default_factory=dict)  # symbol -> letter, for text
    calibration: Calibration | None = None  # what passes over the weights go by
    spelling: Sequence[str] | None = None  # the text of each token, where a pass goes by it
    second_model: Program | None = None  # another model without state, where a pass goes by it
    traces: dict[Any, Any] = field(default_factory=dict)  # of accel.ir.trace; copies share them
    # what operators gave for fake operands of some shapes: layers are alike, and arithmetic on symbols is slow
    shapes: dict[Any, Tensor] = field(default_factory=dict)
    # layer -> name -> tensor, by method: trained parts that were read before weights were stored otherwise
    parts: dict[str, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    examples: dict[str, Tensor] = field(
        default_factory=dict
    )  # of inputs with a default: for checks

    @property
    def step(self) -> Entry:
        return self.entries["step"]

    def graphs(self, entry: Entry | None = None) -> Iterator[fx.Graph]:
        """Every graph (of one entry, or of all), regions included, outermost first."""
        todo = [e.graph for e in ([entry] if entry else self.entries.values())]
        while todo:
            graph = todo.pop(0)
            yield graph
            regions = [n.target for n in graph.nodes if isinstance(n.target, Region)]
            todo.extend(g for r in regions for g in graphs_of(r))

    def nodes(self, *targets: Any, entry: Entry | None = None) -> list[fx.Node]:
        """Call nodes of these operators (of any, where none is named), in order, regions included."""
        return [
            n
            for g in self.graphs(entry)
            for n in g.nodes
            if n.op == "call_function" and (not targets or n.target in targets)
        ]

    def run(self, entry: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run an entry by the reference of every operator. Inputs and outputs by name."""
        e = self.entries[entry]
        inputs = {**e.defaults, **inputs}
        if missing := [n for n in e.inputs if n not in inputs]:
            raise KeyError(f"{entry} needs {missing}")
        with torch.no_grad():
            return dict(zip(e.outputs, execute(e.graph, self.params, inputs), strict=True))

    def copy(self) -> Program:
        """A program of its own over the same parameters: passes over one leave the other as it is."""
        entries = {
            n: Entry(_copied(e.graph, {}), list(e.outputs), dict(e.defaults))
            for n, e in self.entries.items()
        }
        return replace(
            self, params=self.params.copy(), entries=entries, facts=deepcopy(self.facts),
            state=list(self.state), dims=dict(self.dims),
        )  # fmt: skip

    def text(self) -> str:
        """A stable form that people read; `accel.ir.parser.read.parse` reads it back."""
        return program_text(self.entries, self.dims, self.state)


def _copied(graph: fx.Graph, regions: dict[Region, Region]) -> fx.Graph:
    """A graph and its regions again; one that is called twice is copied once."""
    new = deepcopy(graph)
    for node in new.nodes:
        if isinstance(node.target, Region):
            old = node.target
            if old not in regions:
                graphs = [_copied(graph, regions) for graph in graphs_of(old)]
                regions[old] = type(old)(old.name, *graphs)
            node.target = regions[old]
    return new


def execute(
    graph: fx.Graph,
    params: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    value_of: ValueOf | None = None,
) -> Any:
    """Run a whole graph; a parameter is read by each use, and values are freed after their last. value_of: what
    computes a node, in place of `compute`.
    """
    values: dict[fx.Node, Any] = {}
    last = last_uses(graph)
    for node in graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], lambda n: operand(n, params, values))
        if node.op != "get_attr":
            values[node] = (value_of or compute)(node, params, inputs, values)
        for dead in last.get(node, ()):
            values.pop(dead, None)
    raise ValueError("the graph returns nothing")


def evaluate(
    nodes: Iterable[fx.Node],
    params: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    known_values: Mapping[fx.Node, Any] | None = None,
    value_of: ValueOf | None = None,
) -> list[Any]:
    """Values of some nodes, computing only what they need; `known_values` cuts the graph at those nodes.

    value_of: what computes a node, in place of `compute`.
    """
    value_of = value_of or compute
    values = dict(known_values or {})
    outputs = list(nodes)
    needed = ancestors(outputs, stop=set(values))
    waiting = {n: sum(u in needed for u in n.users) for n in needed}
    for node in outputs[0].graph.nodes if outputs else ():
        if node not in needed or node in values or node.op == "get_attr":
            continue
        values[node] = value_of(node, params, inputs, values)
        for parent in node.all_input_nodes:
            waiting[parent] -= 1
            if not waiting[parent] and parent not in outputs:
                values.pop(parent, None)
    return [operand(n, params, values) for n in outputs]


def compute(
    node: fx.Node,
    params: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    values: Mapping[fx.Node, Any],
) -> Any:
    """The value of one node, its operands known."""
    if node.op == "placeholder":
        return inputs[str(node.target)]
    if node.op == "get_attr":
        return params[str(node.target)]
    args = map_arg(node.args, lambda n: operand(n, params, values))
    kwargs = map_arg(node.kwargs, lambda n: operand(n, params, values))
    if isinstance(node.target, Region):
        skipped = isinstance(node.target, Conditional) and not args[0]
        graph = node.target.otherwise if skipped else node.target.graph  # type: ignore[attr-defined]
        names = [str(p.target) for p in graph.find_nodes(op="placeholder")]
        return execute(graph, params, dict(zip(names, args, strict=True)))
    target: Any = topk if node.target is TOPK else node.target
    return target(*args, **kwargs)


def operand(node: fx.Node, params: Mapping[str, Tensor], values: Mapping[fx.Node, Any]) -> Any:
    """A value that is known, or else a parameter, read now."""
    return (
        params[str(node.target)] if node not in values and node.op == "get_attr" else values[node]
    )


def ancestors(nodes: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from, not looking past `stop`."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                todo.extend(node.all_input_nodes)
    return seen


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that nobody reads after it."""
    user: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            user[source] = node
    last: dict[fx.Node, list[fx.Node]] = {}
    for source, node in user.items():
        last.setdefault(node, []).append(source)
    return last


def symbolic_size(fake: Any, example: int) -> Any:
    """A new symbolic size among fake values; a number where the example is 0 or 1."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return fake.from_tensor(torch.empty(example), symbolic_context=context).shape[0]


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout)


def _form(value: Any) -> Hashable | None:
    """What a result's shape, strides and type depend on; none where that cannot be told, or an operand is written."""
    if isinstance(value, Tensor):
        sizes = _form((*value.shape, *value.stride()))
        return None if sizes is None else (sizes, value.dtype, value.requires_grad)
    if isinstance(value, torch.SymInt):
        return torch.SymInt, value.node.expr
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch._ops.OpOverload):
        return None if value._schema.is_mutable else value
    if isinstance(value, (list, tuple)):
        parts = tuple(map(_form, value))
        return None if None in parts else parts
    if isinstance(value, dict):
        return _form(tuple(value.items()))
    return None


class Editor:
    """Inserts nodes whose shapes are known at once: each operator is run on its operands' fake values."""

    def __init__(self, program: Program, graph: fx.Graph):
        self.program = program
        self.graph = graph
        self.fake = next(
            n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode")
        )

    def call(
        self, op: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """Insert a call at the graph's insertion point. `like` lends its origin (layer, module)."""
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = self.value(node)
        if like is not None:
            for key in ("nn_module_stack", "layer"):
                if key in like.meta:
                    node.meta[key] = like.meta[key]
        return node

    def value(self, node: fx.Node) -> Any:
        """What a node's operator gives for the fake values of its operands."""
        args = map_arg(node.args, lambda n: n.meta["val"])
        kwargs = map_arg(node.kwargs, lambda n: n.meta["val"])
        assert callable(node.target)
        form = _form((node.target, args, kwargs))
        key = (self.fake, form)
        if key in self.program.shapes:
            return self.program.shapes[key]
        with shapes_in_python(), self.fake, torch.no_grad():
            value = node.target(*args, **kwargs)
        if form is not None and isinstance(value, Tensor) and not free_unbacked_symbols(value):
            self.program.shapes[key] = value
        return value

    def param(self, name: str, tensor: Tensor | None = None) -> fx.Node:
        """Read a parameter; `tensor` is its value where it is new."""
        if name not in self.program.params:
            assert tensor is not None
            self.program.params[name] = tensor
        node = self.graph.create_node("get_attr", name)
        blank = self.program.params.blank(name)
        with self.fake:
            node.meta["val"] = torch.empty_strided(blank.shape, blank.stride(), dtype=blank.dtype)
        return node

    def derived(self, name: str, source: str, change: Change) -> fx.Node:
        """Read what a parameter becomes by `change`, which is done anew at each reading."""
        if name not in self.program.params:
            self.program.params.derive(name, source, change)
        return self.param(name)

    def stacked(self, name: str, parts: Sequence[str | Tensor]) -> fx.Node:
        """Read parameters (or tensors) one below the other, put together anew at each reading."""
        if name not in self.program.params:
            self.program.params.stack(name, parts)
        return self.param(name)

    def symbol(self, letter: str, example: int) -> Any:
        """A new symbolic size, written as `letter` in text; the example only has to be unlike others."""
        size = symbolic_size(self.fake, example)
        if not isinstance(size, torch.SymInt):
            raise PassError(
                f"size {letter}: torch treats an example size of {example} as a constant; give one of at least 2"
            )
        self.program.dims[str(size)] = letter
        return size

    def placeholder(self, name: str, sizes: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        """A new input, after the others."""
        with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
            node = self.graph.placeholder(name)
        with self.fake:
            node.meta["val"] = torch.empty(tuple(sizes), dtype=dtype)
        return node
