"""An entry that takes recurrent state to behind some of a call's tokens, without running these again."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from accel.ir.entries.replay import REPLAY, taken_of
from accel.ir.ops.op import operand_of
from accel.ir.ops.recurrence import RECURRENT
from accel.ir.program import Editor, Program
from accel.ir.region import Entry
from accel.ir.state import output_of
from accel.passes import Pass, Report
from accel.passes.entry_inputs import EntryInputs
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head


@dataclass(frozen=True)
class Replay(Pass):
    """Outputs of the step, `taken.<state>.<operand> [B,T,…]`: what each recurrence took in of each token. And a new
    entry

    `replay(positions [B,T], taken.<state>.<operand>) -> state`: the recurrences alone, over the state from before a
    call. A token whose position is -1 changes nothing, so it leaves the state behind as many tokens of each row as
    stand. It computes no product with a weight, which is what most of a call takes.
    """

    after = (Cache, Head)
    flat = True

    def run(self, program: Program) -> Report:
        step = program.step
        sites = program.nodes(*RECURRENT, entry=step)
        if not sites:
            return Report()
        outputs, graph = step.output_nodes(), fx.Graph()
        inputs = EntryInputs(program, graph)
        positions = inputs.shared("positions")
        batch, width = positions.meta["val"].shape
        given: list[dict[str, Any]] = []
        for node in sites:
            state = str(operand_of(node, "state").target)
            operands: dict[str, Any] = {}
            for argument in node.target._schema.arguments:  # type: ignore[union-attr]
                value = operand_of(node, argument.name)
                if argument.name == "state":
                    value = inputs.shared(state)
                elif argument.name == "positions":
                    value = positions
                elif isinstance(value, fx.Node) and _by_token(value, batch, width):
                    name, shape = taken_of(state, argument.name), value.meta["val"].shape[2:]
                    outputs[name] = value
                    value = inputs.new(name, batch, width, *shape, dtype=value.meta["val"].dtype)
                operands[argument.name] = value
            given.append(operands)
        editor, after, known = (
            Editor(program, graph),
            dict[str, fx.Node](),
            dict[fx.Node, fx.Node](),
        )
        for node, operands in zip(sites, given, strict=True):
            args = [
                value
                if not isinstance(value, fx.Node) or value.graph is graph
                else _copied(editor, value, known)
                for value in operands.values()
            ]
            found = editor.call(node.target, *args, like=node)  # type: ignore[arg-type]
            place = len(found.meta["val"]) - 1
            state = str(operands["state"].target)
            after[output_of(state)] = editor.call(operator.getitem, found, place, like=node)
        graph.output(tuple(after.values()))
        step.set_outputs(outputs)
        program.entries[REPLAY.name] = Entry(graph, list(after))
        return Report(changed=len(sites))


def _by_token(node: fx.Node, batch: Any, width: Any) -> bool:
    """Whether a value [B,T,…] is computed of each token."""
    shape = node.meta["val"].shape
    return len(shape) > 1 and str(shape[0]) == str(batch) and str(shape[1]) == str(width)


def _copied(editor: Editor, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """A value that is computed from parameters alone, in another graph."""
    if node not in known:
        if node.op == "get_attr":
            known[node] = editor.param(str(node.target))
        else:
            args = fx.map_arg(node.args, lambda n: _copied(editor, n, known))
            kwargs = fx.map_arg(node.kwargs, lambda n: _copied(editor, n, known))
            known[node] = editor.call(node.target, *args, like=node, **kwargs)  # type: ignore[arg-type]
    return known[node]
