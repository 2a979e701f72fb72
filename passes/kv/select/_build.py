"""A program while its layers get their lists of pages: what a method adds to it, and who may read whose list."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import operands_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import Conditional
from accel.ir.state import Part, name_of, output_of
from accel.ir.trace import trace
from accel.passes.clean.clean import remove_dead
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Parts

Named = dict[str, Tensor]
Nodes = Mapping[str, fx.Node]
Constants = Mapping[str, tuple[str, Tensor]]  # name -> parameter, value
Stored = tuple[str, tuple[int | str, ...]]  # dtype, sizes, of which some are letters
_EXAMPLE = 47  # size while shapes are worked out; each letter has another


@dataclass
class Build:
    """A program while its layers get their lists.

    chooses: whether this call chooses. tables, trained: a method's tensors of each layer. layers: those that choose.
    shared: what a method makes once for all layers.
    """

    program: Program
    chooses: fx.Node
    letters: dict[str, Any]
    tables: Parts
    trained: Parts
    outputs: dict[str, fx.Node]
    layers: tuple[int, ...]
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def editor(self) -> Editor:
        """Of the step."""
        return Editor(self.program, self.program.step.graph)

    def every(self, slots: int) -> str:
        """The letter of a size that is one for so many slots."""
        letter = f"C/{slots}"
        if letter not in self.letters:
            self.letters[letter] = self.editor.symbol(letter, _EXAMPLE - 2 * len(self.letters))
        return letter

    def declare(
        self, part: Part, layer: int | None, values: Mapping[str, Stored], fill: float = 0
    ) -> dict[str, fx.Node]:
        """Declare state, and what it holds before the call."""
        states = [State(part, layer, *x, fill, detail=name) for name, x in values.items()]
        made = (buffer(self.program, self.editor, s, self.letters) for s in states)
        return dict(zip(values, made, strict=True))

    def becomes(self, part: Part, layer: int | None, values: Nodes) -> None:
        """What state holds after the call."""
        self.outputs |= {output_of(name_of(part, layer, detail=n)): x for n, x in values.items()}

    def asked(self, node: fx.Node, queries: fx.Node | None = None) -> dict[str, fx.Node]:
        """What a choice of an attention's tokens starts from: queries [B,T,H,D] (by default its own) at positions
        [B,T], positions k_pos in the slots [B,C], and the call's first slots [B].
        """
        x, editor = operands_of(node), self.editor
        if queries is None:
            with editor.graph.inserting_before(node):
                queries = editor.call(torch.ops.aten.transpose.int, x.q, 1, 2, like=node)
        slots = self.program.step.input("slots")
        return {"queries": queries, "positions": x.q_pos, "k_pos": x.k_pos, "slots": slots}

    def made(
        self,
        node: fx.Node,
        name: str,
        function: Callable[[Named], Any],
        x: Nodes,
        key: Hashable,
    ) -> Any:
        """What a function makes of named values, before an attention; `key`: see `trace`."""
        with self.program.step.graph.inserting_before(node):
            return traced(self.editor, name, function, x, key, node)

    def either(
        self,
        node: fx.Node,
        name: str,
        then: Callable[[Named], Any],
        otherwise: Callable[[Named], Any],
        x: Nodes,
        key: Hashable,
        condition: fx.Node | None = None,
        constants: Constants | None = None,
    ) -> list[fx.Node]:
        """A region before an attention that does one of two things with named values: `then` where the condition holds
        (by default: this call chooses), with constants of its own, too. `key`: what the functions go by.
        """
        given = (condition or self.chooses, *x.values())
        layer = node.meta["layer"]
        graphs = (
            self._graph(layer, function, given, tuple(x), (name, way, key), table)
            for way, function, table in ((True, then, constants or {}), (False, otherwise, {}))
        )
        region = Conditional(f"{name}.{layer}", *graphs)
        editor = self.editor
        with editor.graph.inserting_before(node):
            call = editor.graph.call_function(region, given)
            (out,) = region.graph.find_nodes(op="output")
            call.meta |= {"val": tuple(v.meta["val"] for v in out.args[0]), "layer": layer}
            found = range(len(out.args[0]))
            return [editor.call(operator.getitem, call, i, like=node) for i in found]

    def _graph(
        self,
        layer: int,
        function: Callable[[Named], Any],
        operands: tuple[fx.Node, ...],
        names: tuple[str, ...],
        key: Hashable,
        table: Constants,
    ) -> fx.Graph:
        """What a function does with operands, the first (a condition) left out, and with parameters of its own."""
        graph = fx.Graph()
        holders = []
        for i, node in enumerate(operands):
            known = str(node.target) if node.op == "placeholder" else f"x{i}"
            holders.append(graph.placeholder(known))
            holders[-1].meta["val"] = node.meta["val"]
        editor = Editor(self.program, graph)
        x = dict(zip(names, holders[1:], strict=True))
        x |= {n: editor.param(*one) for n, one in table.items()}
        found = traced(editor, f"pages.{layer}", function, x, key)
        graph.output(found if isinstance(found, tuple) else (found,))
        remove_dead(graph)  # what a vote did not ask for
        return graph


def traced(
    editor: Editor,
    name: str,
    function: Callable[[Named], Any],
    x: Nodes,
    key: Hashable,
    like: fx.Node | None = None,
) -> Any:
    """`trace`, of a function of named values."""
    names = tuple(x)
    return trace(
        editor, name, lambda *values: function(dict(zip(names, values, strict=True))), *x.values(),
        like=like, key=(key, names),
    )  # fmt: skip


def no_list(groups: int, x: Named) -> Tensor:
    """No list of pages [B,G,0,1], since everything is read."""
    return x["positions"].new_zeros((x["positions"].shape[0], groups, 0, 1))
