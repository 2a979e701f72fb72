"""Exits in the graph: a layer says whether what leaves it is sure, and the layers above run where it is not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.depth import LAYERS_RAN
from accel.ir.errors import PassError
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program, ancestors
from accel.ir.region import Conditional
from accel.ir.trace import trace
from accel.passes.depth._joint import holders

aten = torch.ops.aten


@dataclass(frozen=True)
class Measure:
    """How sure a token is at an exit: [...], above a threshold. `of`: of its logits [...,V] where `head`, else of the
    stream behind the layer and before it [...,E], and the layer's trained tensors. tried: thresholds to try, from the
    surest on.
    """

    of: Callable[..., Tensor]
    tried: Callable[[], list[float]]
    head: bool

    def at(self, logits: Tensor, after: Tensor, before: Tensor, learnt: Sequence[Tensor]) -> Tensor:
        """At one exit, [...]."""
        return self.of(logits) if self.head else self.of(after, before, *learnt)


def head_of(program: Program, stream: fx.Node) -> list[fx.Node]:
    """The nodes from the residual stream behind the last layer to the logits, in order."""
    graph, logits = program.step.graph, program.step.output_nodes()["logits"]
    needed = ancestors([logits], stop={stream})
    below = {stream}
    fixed: set[fx.Node] = set()  # parameters, and casts of them
    found = []
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (
            node.op == "call_function" and inputs and fixed.issuperset(inputs)
        ):
            fixed.add(node)
        if node in needed and below.intersection(inputs):
            below.add(node)
            found.append(node)
        elif node in needed and node in fixed and node.op != "get_attr":
            found.append(node)
    if not found or found[-1] is not logits or not any(map(_chooses, found)):
        raise PassError(
            "calm: the LM head, which gives the confidence, was not found; build without calm"
        )
    return found


def unless(program: Program, call: fx.Node, done: fx.Node) -> None:
    """A layer runs where it is asked for and nothing below was sure."""
    flag = call.args[0]
    with call.graph.inserting_before(call):
        editor = Editor(program, call.graph)
        open_ = editor.call(aten.logical_not.default, done)
        call.update_arg(0, editor.call(aten.logical_and.default, flag, open_))


def exit_of(
    program: Program,
    call: fx.Node,
    measure: Measure,
    learnt: Sequence[Tensor],
    head: list[fx.Node],
    stream: fx.Node,
    limit: fx.Node,
    done: fx.Node | None,
) -> fx.Node:
    """Let a layer say as its last result whether each token whose logits the call asks for is sure behind it, by a
    `measure` with the tensors that it has `learnt`; where the layer is left out, what was said before. head: the nodes
    from the last layer's `stream` to the logits.
    """
    region = call.target
    assert isinstance(region, Conditional)
    if done is None:
        with call.graph.inserting_before(call):
            done = Editor(program, call.graph).call(aten.full.default, [], False, dtype=torch.bool)
    members = set(head)
    rows = next(filter(_chooses, head)).args[1]
    assert isinstance(rows, fx.Node)
    outer = (
        dict.fromkeys(
            n for n in head for n in n.all_input_nodes if n not in members and n.op != "get_attr"
        )
        if measure.head
        else {rows: None}
    )
    given = [n for n in outer if n is not stream] + [limit, done]
    for graph in (region.graph, region.otherwise):
        inside = holders(graph, call, given)
        (out,) = graph.find_nodes(op="output")
        results = out.args[0]
        assert isinstance(results, tuple)
        last = inside[done]
        if graph is region.graph:
            with graph.inserting_before(out):
                editor = Editor(program, graph)
                name, most = region.name, inside[limit]
                if measure.head:
                    logits = _copied(editor, head, {**inside, stream: results[0]})
                    last = trace(
                        editor, name, lambda x, most: measure.of(x).min() >= most, logits, most
                    )
                else:
                    before = inside[call.args[1]]  # type: ignore[index]
                    tensors = [
                        editor.param(f"{name}.exit.{i}", tensor) for i, tensor in enumerate(learnt)
                    ]

                    def sure(
                        after: Tensor, before: Tensor, rows: Tensor, most: Tensor, *learnt: Tensor
                    ) -> Tensor:
                        pair = (take_rows(after, rows), take_rows(before, rows))
                        return measure.of(*pair, *learnt).min() >= most

                    last = trace(
                        editor, name, sure, results[0], before, inside[rows], most, *tensors
                    )
        out.args = ((*results, last),)
    call.args = (*call.args, *(n for n in given if n not in call.args))
    call.meta["val"] = (*call.meta["val"], done.meta["val"])
    place = len(call.meta["val"]) - 1
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, place))
    item.meta["val"] = done.meta["val"]
    return item


def count_layers(program: Program, calls: Sequence[fx.Node]) -> None:
    """Give how many layers ran, for each token [B,T], as an output of the step."""
    graph, tokens = program.step.graph, program.step.input("tokens")
    flags = [flag for call in calls if isinstance(flag := call.args[0], fx.Node)]
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):

        def counted(tokens: Tensor, *flags: Tensor) -> Tensor:
            ran = torch.stack([flag.float() for flag in flags]).sum()
            return torch.zeros_like(tokens, dtype=torch.float32) + ran

        ran = trace(Editor(program, graph), LAYERS_RAN, counted, tokens, *flags)
    program.step.set_outputs({**program.step.output_nodes(), LAYERS_RAN: ran})


def _chooses(node: fx.Node) -> bool:
    return node.target is take_rows.default


def _copied(editor: Editor, nodes: list[fx.Node], env: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same computation of other values."""
    env = dict(env)
    for node in nodes:
        for parent in node.all_input_nodes:
            if parent.op == "get_attr" and parent not in env:
                env[parent] = editor.param(str(parent.target))
        env[node] = editor.graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    return env[nodes[-1]]
