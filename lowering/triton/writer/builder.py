"""A flat FX graph in the making: regions in line, parameters by plain names, operators as the table lowers them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.program import Program
from accel.ir.region import Conditional, Entry, Region, graphs_of
from accel.ir.state import output_of
from accel.ir.weights import Stored
from accel.lowering.triton.writer.flags import BY_SHAPES, Flag, flag_of
from accel.lowering.triton.writer.halves import HALVES, READERS, WIDEN
from accel.lowering.triton.writer.table import lower

aten = torch.ops.aten
_SIZE = aten.sym_size.int
_TO_FLOAT = {"dtype": torch.float32}


class Builder:
    """What a rule sees: nodes of the new graph, the shapes of what they stand for, and calls to add."""

    def __init__(
        self,
        program: Program,
        device: str,
        tensors: dict[str, Tensor] | None = None,
        narrow: Mapping[str, Stored] | None = None,
    ):
        """`tensors`: parameters that other graphs have moved to the device already, by name. `narrow`: those that are
        moved there in half precision, as they are stored.
        """
        self.program = program
        self.device = device
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors
        self.narrow: Mapping[str, Stored] = {} if narrow is None else narrow
        self.graph = fx.Graph()
        self.halves: set[fx.Node] = set()  # parameters of float32 that lie in half precision
        self.states: dict[str, fx.Node] = {}  # by name: those that the entry may write in place
        self.plan: dict[
            str, fx.Node
        ] = {}  # by name: values of inputs that the host knows, and flags
        self.flags: dict[str, Flag] = {}  # by name: those that the host computes
        self.waits = False  # whether a branch goes by what the device computes
        self._sayable: dict[fx.Node, str] = {}  # inputs whose values the host may know
        self._inputs: dict[fx.Node, str] = {}
        self._params: dict[str, fx.Node] = {}
        self._made: dict[tuple[Any, ...], fx.Node] = {}

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function of tensors; None and False are left as they are."""
        return self.graph.call_function(function, args, kwargs)

    def once(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A call of a function without effects; equal ones are one."""
        key = (function, *args)
        if key not in self._made:
            self._made[key] = self.call(function, *args)
        return self._made[key]

    def value(self, node: Any) -> Any:
        """The fake value of what a node stands for; its shape is symbolic."""
        return node.meta["val"]

    def shape(self, node: Any) -> torch.Size:
        shape: torch.Size = self.value(node).shape
        return shape

    def entry(self, entry: Entry, states: list[str]) -> list[str]:
        """Add a whole entry; `states`, among its inputs, are written in place. Returns what it gives
        besides them, in order.
        """
        values: dict[str, fx.Node] = {}
        for index, name in enumerate(entry.inputs):
            values[name] = self.graph.placeholder(f"x{index}")
            values[name].meta["val"] = entry.input(name).meta["val"]
        self._inputs = {node: name for name, node in values.items()}
        self.states = {name: values[name] for name in states}
        self._sayable = {values[name]: name for name in entry.defaults}
        found = dict(zip(entry.outputs, self._inline(entry.graph, values), strict=True))
        kept = {name: found.pop(output_of(name)) for name in states}
        self._settle(kept)
        self.graph.output(tuple(found.values()))
        self.graph.eliminate_dead_code(_is_impure)
        return list(found)

    def _inline(self, graph: fx.Graph, values: dict[str, fx.Node]) -> list[fx.Node]:
        """A graph over named values; what it returns."""
        env: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "output":
                return list(map_arg(node.args[0], env.__getitem__))
            env[node] = self._node(node, env, values)
            if isinstance(env[node], fx.Node) and "val" in node.meta:
                env[node].meta.setdefault("val", node.meta["val"])
        raise ValueError("a graph without an output")

    def _node(self, node: fx.Node, env: dict[fx.Node, Any], values: dict[str, fx.Node]) -> Any:
        if node.op == "placeholder":
            return values[str(node.target)]
        if node.op == "get_attr":
            return self._param(str(node.target))
        args: Any = map_arg(node.args, env.__getitem__)
        kwargs: Any = map_arg(node.kwargs, env.__getitem__)
        if node.target is WIDEN and args[0] in self.halves and kwargs == _TO_FLOAT:
            return args[0]
        if not isinstance(node.target, Region) or isinstance(node.target, Conditional):
            args, kwargs = self._wide(node.target, args, kwargs)
        if isinstance(node.target, Conditional):
            rule = lower.rules.get(Conditional)
            made = NotImplemented if rule is None else rule(self, node.target, args)
            return self._choice(node.target, args) if made is NotImplemented else made
        if isinstance(node.target, Region):
            names = [str(p.target) for p in node.target.graph.find_nodes(op="placeholder")]
            return tuple(self._inline(node.target.graph, dict(zip(names, args, strict=True))))
        target: Any = node.target
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        rule = lower.rules.get(target)
        if rule is not None and (made := rule(self, *args, **kwargs)) is not NotImplemented:
            return made
        if "device" in kwargs:  # what was captured on the CPU
            kwargs = {**kwargs, "device": torch.device(self.device)}
        return self.call(target, *args, **kwargs)

    def _choice(self, region: Conditional, args: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """A branch of the host, which waits for the flag where the device computes it. What either side writes in place
        counts as written by the call.
        """
        sides = [Side(self, graph, args) for graph in graphs_of(region)]
        self.waits = self.waits or any(side.waits for side in sides)
        if (flag := self._flag(args[0])) is None:
            flag, self.waits = args[0], True
        extras = [tuple(side.extra.values()) for side in sides]
        call = self.call(_branch(region.name, [s.module() for s in sides]), flag, args, *extras)
        written = {i for side in sides for i in side.written}
        call.meta["into"] = tuple(args[i] for i in sorted(written))
        results = []
        for index, given in enumerate(zip(*(side.gives for side in sides), strict=True)):
            results.append(self.call(operator.getitem, call, index))
            if given[0] is not None and len(set(given)) == 1:
                results[-1].meta["writes"] = args[given[0]]
        return tuple(results)

    def _flag(self, node: fx.Node) -> fx.Node | None:
        """The value of a flag that the host knows: an input, an element of one, what shapes say, or what follows from
        the call; None where the device computes it.
        """
        if node in self._sayable:
            return self.say(self._sayable[node])
        if (known := BY_SHAPES.get(node.target)) is not None:
            return self.once(known, *node.args)
        if node.target is aten.select.int and (whole := node.args[0]) in self._sayable:
            assert isinstance(whole, fx.Node)
            return self.once(operator.getitem, self.say(self._sayable[whole]), node.args[2])
        if (flag := flag_of(node, self._inputs)) is None:
            return None
        same = (name for name, other in self.flags.items() if other.alike == flag.alike)
        name = next(same, f"flag {len(self.flags)}")
        self.flags.setdefault(name, flag)
        return self.say(name)

    def say(self, name: str) -> fx.Node:
        """An input's value as the host knows it: a bool, or a tuple of them."""
        if name not in self.plan:
            self.plan[name] = self.graph.placeholder(f"said{len(self.plan)}")
        return self.plan[name]

    def _param(self, name: str) -> fx.Node:
        if name not in self._params:
            node = self.graph.create_node("get_attr", f"p{len(self._params)}")
            node.meta["val"] = self._blank(name)
            self._params[name] = node
            if self.in_half(name):
                self.halves.add(node)
        return self._params[name]

    def in_half(self, name: str) -> bool:
        """Whether a parameter lies in half precision where the program computes with it in float32."""
        stored = self.program.params.blank(name).dtype
        lies = self._blank(name).dtype
        return lies in HALVES and (lies != stored or name in self.narrow)

    def _blank(self, name: str) -> Tensor:
        """A parameter as it lies on the device, on the meta device."""
        if name in self.tensors:
            return self.program.params.blank(name).to(self.tensors[name].dtype)
        return self.narrow[name].blank if name in self.narrow else self.program.params.blank(name)

    def _wide(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Operands with parameters in float32, but for the weight that a product reads as it lies."""

        def widened(node: fx.Node) -> fx.Node:
            if node not in self.halves:
                return node
            wide = self.once(Tensor.float, node)
            wide.meta["val"] = self.value(node).float()
            return wide

        weight = READERS.get(target)
        return (
            tuple(a if i == weight else map_arg(a, widened) for i, a in enumerate(args)),
            {
                n: a if weight is not None and n == "weight" else map_arg(a, widened)
                for n, a in kwargs.items()
            },
        )

    def _settle(self, next_states: dict[str, fx.Node]) -> None:
        """Leave each state's next value in its buffer: what was not written there is copied at the end."""
        for node in list(self.graph.nodes):
            self._guard(node)
        moved = {}
        for name, node in next_states.items():
            if self.states[name] not in (node, node.meta.get("writes")):
                moved[name] = node if _is_new(node) else self.call(aten.clone.default, node)
        for name, node in moved.items():
            self.call(aten.copy_.default, self.states[name], node)

    def _guard(self, node: fx.Node) -> None:
        """Let a node write in place only into a state that nothing else reads: else into a copy."""
        for holder in node.meta.get("into", ()):
            readers = [u for u in holder.users if u is not node and u.target is not _SIZE]
            if holder in self.states.values() and not readers:
                continue
            with self.graph.inserting_before(node):
                copy = self.call(aten.clone.default, holder)
            node.replace_input_with(holder, copy)
            for found in (node, *node.users):
                if found.meta.get("writes") is holder:
                    del found.meta["writes"]

    def module(self) -> fx.GraphModule:
        """The graph as a callable; parameters are read and moved to the device once."""
        names = {str(node.target): name for name, node in self._params.items()}
        root: Any = {}
        for node in self.graph.find_nodes(op="get_attr"):
            name = names[str(node.target)]
            if name not in self.tensors:
                stored = self.narrow.get(name) or self.program.params.stored(name)
                self.tensors[name] = stored.read().detach().to(self.device)
            root[str(node.target)] = self.tensors[name]
        self.graph.lint()
        return fx.GraphModule(root, self.graph)


class Side(Builder):
    """One of the graphs that a branch chooses from, over the branch's arguments.

    gives: for each result the index of the argument that it is, as it was or written in place.
    written: arguments that it writes. extra: what the graph around has made for it.
    """

    def __init__(self, outer: Builder, graph: fx.Graph, args: tuple[fx.Node, ...]):
        super().__init__(outer.program, outer.device, outer.tensors, outer.narrow)
        self._outer = outer
        self.extra: dict[fx.Node, Any] = {}  # here -> around
        values: dict[str, fx.Node] = {}
        self._args: dict[fx.Node, fx.Node] = {}
        for i, (holder, arg) in enumerate(
            zip(graph.find_nodes(op="placeholder"), args, strict=True)
        ):
            mine = values[str(holder.target)] = self.graph.placeholder(f"x{i}")
            mine.meta["val"] = holder.meta["val"]
            self._args[mine] = arg
        self.states = {
            n: mine for n, mine in values.items() if self._args[mine] in outer.states.values()
        }
        self._sayable = {
            mine: outer._sayable[arg] for mine, arg in self._args.items() if arg in outer._sayable
        }
        places = {mine: i for i, mine in enumerate(values.values())}
        results = self._inline(graph, values)
        for node in list(self.graph.nodes):
            self._guard(node)
        self.gives = [places.get(r.meta.get("writes", r)) for r in results]
        self.written = {
            places[h] for n in self.graph.nodes for h in n.meta.get("into", ()) if h in places
        }
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code(_is_impure)

    def once(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """What depends on the arguments alone is made by the graph around, for all that ask."""
        key = (function, *args)
        nodes = [a for a in args if isinstance(a, fx.Node)]
        if key not in self._made and all(a in self._args for a in nodes):
            around = self._outer.once(function, *(self._args.get(a, a) for a in args))
            self._made[key] = self.graph.placeholder(f"y{len(self.extra)}")
            self.extra[self._made[key]] = around
        return super().once(function, *args)

    def _flag(self, node: fx.Node) -> fx.Node | None:
        """What is a flag around is one here."""
        around = self._args.get(node)
        if around is not None and node not in self._sayable:
            known = self._outer._flag(around)
            return None if known is None else self._from_around(known)
        return super()._flag(node)

    def say(self, name: str) -> fx.Node:
        """The graph around says it."""
        if name not in self.plan:
            self.plan[name] = self._from_around(self._outer.say(name))
        return self.plan[name]

    def _from_around(self, node: fx.Node) -> fx.Node:
        mine = self.graph.placeholder(f"y{len(self.extra)}")
        self.extra[mine] = node
        return mine


def _branch(name: str, sides: list[fx.GraphModule]) -> Callable[..., Any]:
    """A function that runs the first side or the other, by a flag."""

    def branch(flag: Any, args: tuple[Any, ...], *extras: tuple[Any, ...]) -> Any:
        chosen = 0 if flag else 1
        return sides[chosen](*args, *extras[chosen])

    branch.__name__ = f"branch_{name.replace('.', '_')}"
    return branch


def _is_impure(node: fx.Node) -> bool:
    """Whether a node stays although nobody reads it."""
    return (
        node.op in ("placeholder", "output")
        or "into" in node.meta
        or node.target is aten.copy_.default
    )


def _is_new(node: fx.Node) -> bool:
    """Whether a value shares no memory with what it is computed from."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    op = source.target
    return isinstance(op, torch._ops.OpOverload) and not any(
        r.alias_info for r in op._schema.returns
    )
