"""Layers that do the same are traced once: the others of a kind are calls, which get copies of its nodes afterwards.

Two layers are of one kind where their modules, the shapes of their tensors and all other attributes are equal. Only an
attribute that counts the layers may differ, and the traced layer must not read it. Two calls are alike where they are
given as many tensors of the same shapes and types, and the same plain values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from accel.ir.ops.op import LIBRARY

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_OWN = {
    "_modules",
    "_parameters",
    "_buffers",
}  # what a module's attributes hold, told apart from the rest


def _like(index: int, inputs: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [v.new_empty_strided(v.shape, v.stride()) for v in like]


# A border of a layer while a model is traced: it gives tensors like some others, and is gone from what is captured.
LIBRARY.define("border(int index, Tensor[] inputs, Tensor[] like) -> Tensor[]")
LIBRARY.impl("border", _like, "CompositeExplicitAutograd")
torch.library.register_fake("accel::border", _like, lib=LIBRARY)
_BORDER: Any = torch.ops.accel.border.default


class NotRepeated(Exception):
    """A layer does more than its borders tell, so the model is traced whole."""


@dataclass
class _Traced:
    """A call of a layer that was traced. start, end: its borders. outputs: what it gave, a number for each tensor: of
    what came out of it, or less than 0 for one that it was given (~n).
    """

    layer: nn.Module
    start: int
    end: int = -1
    spec: Any = None
    outputs: list[Any] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # attributes that count layers


@dataclass
class Repeats:
    """What was traced, and what stands for a call of a layer of the same kind."""

    names: dict[nn.Module, str]  # of layers
    traced: dict[Hashable, _Traced] = field(default_factory=dict)
    again: dict[int, tuple[_Traced, nn.Module]] = field(default_factory=dict)  # by its border
    within: _Traced | None = None
    borders: int = 0

    def call(self, layer: nn.Module, kind: Hashable, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a layer, or let one that was traced stand for it."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors, form = _apart(leaves)
        if self.within or form is None or not tensors:
            return forward(*args, **kwargs)
        key = (kind, spec, form, tuple(map(_shape, tensors)))
        known = self.traced.get(key)
        if known is None:
            self.traced[key] = known = _Traced(layer, self.borders)
            return self._trace(known, forward, tensors, form, spec)
        if known.end < 0:
            return forward(*args, **kwargs)
        self.again[self.borders] = (known, layer)
        return _outputs(known, self._border(tensors, known.results), tensors)

    def _trace(
        self, call: _Traced, forward: Any, tensors: list[Tensor], form: Any, spec: Any
    ) -> Any:
        own = self._border(tensors, tensors)
        leaves = [own[at] if kind is Tensor else at for kind, at in form]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        self.within = call
        try:
            out = forward(*args, **kwargs)
        finally:
            self.within = None
        places = {id(t): ~i for i, t in enumerate(own)}
        outputs, call.spec = pytree.tree_flatten(out)
        new, form = _apart([v for v in outputs if id(v) not in places])
        if form is None or not new:
            return out
        places |= {id(t): i for i, t in enumerate(new)}
        call.outputs = [
            (Tensor, places[id(v)]) if isinstance(v, Tensor) else (None, v) for v in outputs
        ]
        call.end = self.borders
        call.results = self._border(new, new)
        return _outputs(call, call.results, tensors)

    def _border(self, inputs: list[Tensor], like: list[Tensor]) -> list[Tensor]:
        self.borders += 1
        found: list[Tensor] = _BORDER(self.borders - 1, inputs, like)
        return found


def _apart(leaves: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...] | None]:
    """The tensors, each once, and of each leaf (Tensor, which) or (its type, its value); none where a leaf is neither a
    tensor nor plain.
    """
    found: dict[int, int] = {}
    tensors: list[Tensor] = []
    form: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if id(leaf) not in found:
                found[id(leaf)] = len(tensors)
                tensors.append(leaf)
            form.append((Tensor, found[id(leaf)]))
        elif isinstance(leaf, _PLAIN):
            form.append((type(leaf), leaf))
        else:
            return tensors, None
    return tensors, tuple(form)


def _shape(tensor: Tensor) -> Hashable:
    return str(tuple(tensor.shape)), str(tensor.stride()), tensor.dtype, tensor.requires_grad


def _outputs(call: _Traced, results: list[Tensor], inputs: list[Tensor]) -> Any:
    """What a layer returns, of its results and of what it was given."""
    leaves = [
        v if kind is not Tensor else results[v] if v >= 0 else inputs[~v]
        for kind, v in call.outputs
    ]
    return pytree.tree_unflatten(leaves, call.spec)


@contextlib.contextmanager
def repeats(root: nn.Module) -> Iterator[Repeats]:
    """Within it, layers of the model are called as `Repeats` tells."""
    layers = _layers(root)
    counting = _counting(layers)
    found = Repeats(layers)
    before: list[tuple[nn.Module, type]] = []
    own: dict[nn.Module, dict[str, Any]] = {}
    try:
        for layer in layers:
            for path, module in layer.named_modules():
                names = [n for n in module.__dict__ if (type(layer), path, n) in counting]
                if names:
                    own.setdefault(module, {}).update({n: _watched(found, n) for n in names})
            forward = _forward(found, layer, _kind(layer, counting), type(layer).forward)
            own.setdefault(layer, {})["forward"] = forward
        for module, attributes in own.items():
            before.append((module, type(module)))
            module.__class__ = _subclass(type(module), attributes)
        yield found
    finally:
        for module, kept in before:
            module.__class__ = kept


def _forward(
    repeats: Repeats, layer: nn.Module, kind: Hashable, forward: Callable[..., Any]
) -> Any:
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return repeats.call(layer, kind, lambda *a, **k: forward(self, *a, **k), args, kwargs)

    return called


def _watched(repeats: Repeats, name: str) -> property:
    """An attribute of a module that notes whether a traced layer reads it."""

    def read(self: nn.Module) -> Any:
        if repeats.within:
            repeats.within.read.add(name)
        return self.__dict__[name]

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


def _subclass(kind: type, attributes: Mapping[str, Any]) -> type:
    told = {n: getattr(kind, n) for n in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**told, **attributes})


def _layers(root: nn.Module) -> dict[nn.Module, str]:
    """The members of the outermost lists of modules, and their names."""
    found: dict[nn.Module, str] = {}
    todo = [("", root)]
    while todo:
        prefix, module = todo.pop(0)
        for name, child in module.named_children():
            listed = isinstance(module, nn.ModuleList)
            if listed and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                if "forward" not in child.__dict__:
                    found.setdefault(child, prefix + name)
            else:
                todo.append((f"{prefix}{name}.", child))
    return found


def _counting(layers: Mapping[nn.Module, str]) -> set[tuple[type, str, str]]:
    """The attributes (of a kind of layer, a path within it, a name) that count in every layer where it stands."""
    found: set[tuple[type, str, str]] = set()
    other: set[tuple[type, str, str]] = set()
    for layer, name in layers.items():
        place = int(name.rpartition(".")[2])
        for path, module in layer.named_modules():
            for key, value in module.__dict__.items():
                counts = type(value) is int and value == place
                (found if counts else other).add((type(layer), path, key))
    return found - other


def _kind(layer: nn.Module, counting: set[tuple[type, str, str]]) -> Hashable:
    """What layers of one kind have in common."""
    found: list[Hashable] = []
    for path, module in layer.named_modules(remove_duplicate=False):
        found.append((path, type(module)))
        for key, value in module.__dict__.items():
            if key not in _OWN and (type(layer), path, key) not in counting:
                found.append((path, key, _value(value, module)))
    first: dict[int, str] = {}
    for path, tensor in _tensors(layer).items():
        alike = first.setdefault(id(tensor), path)
        found.append((path, alike, tuple(tensor.shape), tensor.stride(), tensor.dtype))
    return tuple(found)


def _value(value: Any, owner: nn.Module) -> Hashable:
    """What makes two values of modules equal: what they hold where they are plain, else which object they are."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(_value(v, owner) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((_value(k, owner), _value(v, owner)) for k, v in value.items())
    if isinstance(value, partial):
        return partial, tuple(_value(v, owner) for v in (value.func, value.args, value.keywords))
    if isinstance(value, MethodType) and value.__self__ is owner:
        return MethodType, id(value.__func__)
    return id(value)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def unroll(exported: ExportedProgram, root: nn.Module, repeats: Repeats) -> None:
    """Give each call of a layer the nodes of the one that was traced, over its own parameters.

    Raises:
        NotRepeated: a traced layer reads or writes more than goes through its borders.
    """
    graph = exported.graph
    nodes = list(graph.nodes)
    borders = {int(n.args[0]): n for n in nodes if n.target is _BORDER}
    order = {n: i for i, n in enumerate(nodes)}
    parameters = _placeholders(exported, root)
    bodies: dict[int, list[fx.Node]] = {}
    for index, (call, layer) in repeats.again.items():
        if index not in borders:  # nothing reads what it gives
            continue
        if id(call) not in bodies:
            bodies[id(call)] = _body(call, borders, nodes, order)
        _copy(graph, borders, call, bodies[id(call)], borders[index], layer, parameters, repeats)
    for node in [n for n in nodes if n.target is _BORDER and int(n.args[0]) not in repeats.again]:
        _bypass(graph, node, node.args[1])
    exported.graph_module.recompile()


def _placeholders(exported: ExportedProgram, root: nn.Module) -> dict[int, fx.Node]:
    """For each tensor of the model, by its identity, the node that stands for it."""
    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = _tensors(root)
    return {
        id(tensors[names[n.name]]): n
        for n in exported.graph.find_nodes(op="placeholder")
        if names.get(n.name) in tensors
    }


def _body(
    call: _Traced,
    borders: Mapping[int, fx.Node],
    nodes: list[fx.Node],
    order: Mapping[fx.Node, int],
) -> list[fx.Node]:
    """The nodes of a traced layer. Raises NotRepeated where they cannot be copied."""
    name = type(call.layer).__name__
    if call.read:
        raise NotRepeated(f"{name} reads {', '.join(sorted(call.read))}, which counts the layers")
    if call.start not in borders:
        raise NotRepeated(f"{name} reads nothing that it is given")
    start, end = borders[call.start], borders[call.end]
    body = nodes[order[start] + 1 : order[end]]
    inside, own = set(body), {start, end}
    for node in body:
        value = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotRepeated(f"{name} calls {node.target}, which holds a graph")
        if schema is not None and schema.is_mutable:
            raise NotRepeated(f"{name} writes in place: {node.target}")
        values = [v for v in pytree.tree_leaves(value) if isinstance(v, (Tensor, torch.SymInt))]
        if any(free_unbacked_symbols(v) for v in values):
            raise NotRepeated(f"{name} makes a size that depends on values")
        sized = not any(isinstance(v, Tensor) for v in values)
        if not sized and not all(u in inside or u in own for u in node.users):
            raise NotRepeated(f"{name} gives {node.name} beside its results")
        for source in node.all_input_nodes:
            tensor = isinstance(source.meta.get("val"), Tensor)
            if tensor and source not in inside and source.op != "placeholder":
                raise NotRepeated(f"{name} reads {source.name} beside what it is given")
    return body


def _copy(
    graph: fx.Graph,
    borders: Mapping[int, fx.Node],
    call: _Traced,
    body: list[fx.Node],
    place: fx.Node,
    layer: nn.Module,
    parameters: Mapping[int, fx.Node],
    repeats: Repeats,
) -> None:
    """The nodes of a traced layer once more, in place of a border."""
    start, end = borders[call.start], borders[call.end]
    given: Any = place.args[1]
    copied: dict[fx.Node, fx.Node] = {}
    own = _tensors(layer)
    for path, tensor in _tensors(call.layer).items():
        if id(tensor) in parameters:
            copied[parameters[id(tensor)]] = parameters[id(own[path])]
    before, after = repeats.names[call.layer], repeats.names[layer]
    for node in body:
        if node.args and node.args[0] is start:  # one of what it is given
            copied[node] = given[node.args[1]]
            continue
        with graph.inserting_before(place):
            new = graph.node_copy(node, lambda n: copied.get(n, n))
        new.meta = {**node.meta, "nn_module_stack": _renamed(node, before, after)}
        copied[node] = new
    results: Any = end.args[1]
    _bypass(graph, place, [copied.get(r, r) for r in results])


def _renamed(node: fx.Node, before: str, after: str) -> dict[str, Any]:
    """The modules that a node comes from, of another layer."""
    stack = node.meta.get("nn_module_stack") or {}
    return {
        key: (
            f"{after}{path[len(before) :]}" if f"{path}.".startswith(f"{before}.") else path,
            kind,
        )
        for key, (path, kind) in stack.items()
    }


def _bypass(graph: fx.Graph, border: fx.Node, values: Any) -> None:
    """Let what reads a border's results read these values."""
    for user in list(border.users):
        if any(reader.op == "output" for reader in user.users):
            raise NotRepeated("a layer's result is the model's")
        if user.target is not _BORDER:
            user.replace_all_uses_with(values[user.args[1]])
            graph.erase_node(user)
    if not border.users:
        graph.erase_node(border)
