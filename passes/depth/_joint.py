"""The joints: every layer of the step under a condition, an element of the input `run_layers [L]`, or its branches
under elements of `run_attn [L]` and `run_mlp [L]`; a layer that some tokens take.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import fx

from accel.ir.depth import BRANCHES, NESTED, PROPAGATE, RUN_ATTN, RUN_LAYERS, RUN_MLP
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Region, layer_calls, sizes
from accel.ir.state import Part
from accel.passes.clean.clean import remove_dead
from accel.passes.depth._branches import Branches, Term, branches, state_name
from accel.passes.depth._narrow import narrow
from accel.passes.state.outline import arguments, called, outlined

aten = torch.ops.aten


def layers(program: Program) -> list[fx.Node]:
    """The calls of all layers, in order. Raises PassError where a layer cannot be left out."""
    calls = layer_calls(program.step.graph)
    if len(calls) != len(program.facts.layers) or not calls:
        raise PassError(
            f"depth: {len(calls)} of {len(program.facts.layers)} layers were found in the graph, "
            "but only separate layers can be skipped; build without a depth method"
        )
    state = {value.output for value in program.state}
    names = {node: name for name, node in program.step.output_nodes().items()}
    for call in calls:
        for item in call.users:
            name = names.get(item, item.name)
            if item.args[1] == 0:
                alone = sizes(item) == sizes(_node(call.args[0]))
            else:
                alone = name in state and len(item.users) == 1
            if not alone:
                raise PassError(
                    f"depth: layer {calls.index(call)} outputs more than the residual stream and "
                    f"its own state ({name}), so it cannot be skipped; leave out the depth "
                    "method, or the method that needs this output (a kv.score that observes queries)"
                )
    return calls


def conditions(program: Program, cache: str) -> list[fx.Node]:
    """Put each layer under its element of a new input `run_layers`, bool [L], by default all true.

    cache: what a layer that is left out does with its keys and values (`accel.passes.depth`).
    Returns the layers' calls; the condition is the first argument of each.
    """
    _refuse_recurrent(program)
    calls = layers(program)
    for call, flag in zip(calls, layer_flags(program, RUN_LAYERS, calls), strict=True):
        _condition(program, call, flag, cache)
    return calls


def branch_conditions(program: Program, cache: str) -> list[fx.Node]:
    """Put what attention adds to the stream, and what the MLP adds, under elements of new inputs `run_attn` and
    `run_mlp`, bool [L], by default all true; attention that is left out does with its keys and values what `cache`
    says. Returns the layers' calls.
    """
    _refuse_recurrent(program)
    calls = layers(program)
    found = [
        branches(program, call) for call in calls
    ]  # one that has none is refused before any is changed
    for plan in (RUN_ATTN, RUN_MLP):
        of_layers = layer_flags(program, plan, calls)
        for index, (call, of) in enumerate(zip(calls, found, strict=True)):
            with of.graph.inserting_after(of.graph.find_nodes(op="placeholder")[-1]):
                flag = of.graph.placeholder(plan)
            flag.meta["val"] = of_layers[index].meta["val"]
            call.args = (*call.args, of_layers[index])
            parts = of.parts(of.attention if plan == RUN_ATTN else of.mlp)
            for number, (term, members) in enumerate(parts):
                name = f"{BRANCHES[plan]}.{index}" + (f".{number}" if number else "")
                _branch(program, name, of, term, members, flag, cache)
    return calls


def holders(graph: fx.Graph, call: fx.Node, values: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The placeholder of each value in a graph of a call's region; those that it lacks come after the others."""
    there = list(graph.find_nodes(op="placeholder"))
    found = dict(zip(call.args, there, strict=True))
    for node in values:
        if node not in found:
            with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
                found[node] = graph.placeholder(
                    str(node.target) if node.op == "placeholder" else node.name
                )
            found[node].meta["val"] = node.meta["val"]
    return found  # type: ignore[return-value]


def _refuse_recurrent(program: Program) -> None:
    recurrent = [s.layer for s in program.state if s.part is Part.RECURRENT]
    if recurrent:
        raise PassError(
            f"depth: layer {recurrent[0]} has a recurrent state, which a rewind recomputes from "
            "the tokens without knowing which layers each token ran; build without a depth method"
        )


def layer_flags(program: Program, name: str, calls: list[fx.Node]) -> list[fx.Node]:
    """Of each layer the element of a new input [L], before its call."""
    editor = Editor(program, program.step.graph)
    plan = editor.placeholder(name, (len(calls),), torch.bool)
    program.step.defaults[name] = torch.ones(len(calls), dtype=torch.bool)
    flags = []
    for index, call in enumerate(calls):
        with call.graph.inserting_before(call):
            flags.append(editor.call(aten.select.int, plan, 0, index))
    return flags


def gate(program: Program, call: fx.Node, taken: Callable[[Editor, fx.Node], fx.Node]) -> fx.Node:
    """Let a layer change the residual stream of some tokens alone; no other token's stream passes through it, and it is
    skipped where none does. Its keys and values are those of all tokens. `taken`: makes of the stream [B,T,E] before
    it which tokens those are, bools [B,T]. The stream after it.
    """
    graph, before = program.step.graph, _node(call.args[0])
    editor = Editor(program, graph)
    (after,) = (user for user in call.users if user.args[1] == 0)
    with graph.inserting_before(call):
        tokens = taken(editor, before)
        some = editor.call(aten.any.default, tokens)
    _condition(program, call, some, PROPAGATE)
    return _where(editor, tokens, after, before)


def leave_out(program: Program, call: fx.Node, some: fx.Node, tokens: fx.Node) -> None:
    """Skip a layer, cache and all, where `some` is false; let it change the streams of `tokens` [B,T] alone."""
    before = _node(call.args[0])
    (after,) = (user for user in call.users if user.args[1] == 0)
    _condition(program, call, some, NESTED)
    _where(Editor(program, program.step.graph), tokens, after, before)


def _where(editor: Editor, tokens: fx.Node, after: fx.Node, before: fx.Node) -> fx.Node:
    """after  ->  where(tokens, after, before)."""
    graph = editor.graph
    with graph.inserting_after(after):
        wide = editor.call(aten.unsqueeze.default, tokens, 2)
    with graph.inserting_after(wide):
        routed = editor.call(aten.where.self, wide, after, before)
    after.replace_all_uses_with(routed, delete_user_cb=lambda user: user is not routed)
    return routed


def _condition(program: Program, call: fx.Node, flag: fx.Node, cache: str) -> None:
    """region(x, …)  ->  region(flag, x, …), which may be left out."""
    region = call.target
    assert isinstance(region, Region)
    written = [state_name(program, call, i) for i in range(1, len(call.meta["val"]))]
    call.target = _conditional(program, region, flag, written, cache, _same)
    call.args = (flag, *call.args)


def _branch(
    program: Program,
    name: str,
    of: Branches,
    term: Term,
    members: list[fx.Node],
    flag: fx.Node,
    cache: str,
) -> None:
    """x + f(x)  ->  x + if(flag, f(x), 0), within a layer's graph."""
    states = [n for n in of.results if n in members]
    leaving = [term.value, *(n for n in states if n is not term.value)]
    inputs = arguments(members, of.stream)

    def called_so(node: fx.Node) -> str:
        return str(node.target if node.op == "placeholder" else node.name)

    region = Region(name, outlined(members, leaving, inputs, called_so))
    written = [of.results[n] for n in states]
    region = _conditional(program, region, flag, written, cache, _nothing)
    called(region, [flag, *inputs], members, leaving, members[-1])


def _conditional(
    program: Program,
    region: Region,
    flag: fx.Node,
    written: list[str],
    cache: str,
    instead: Callable[[Editor, fx.Node], fx.Node],
) -> Conditional:
    """A region that may be left out: then its first result is `instead` of its first input, the stream, and the others
    are the state `written`, inputs of the same names, or the next of it where keys and values are propagated.
    """
    otherwise = deepcopy(region.graph)
    inputs = {str(h.target): h for h in otherwise.find_nodes(op="placeholder")}
    (out,) = otherwise.find_nodes(op="output")
    results = out.args[0][1:] if cache == PROPAGATE else [inputs[name] for name in written]
    with otherwise.inserting_before(out):
        first = instead(Editor(program, otherwise), next(iter(inputs.values())))
    out.args = ((first, *results),)
    remove_dead(otherwise)
    if cache == PROPAGATE:
        narrow(program, otherwise)
    for each in (region.graph, otherwise):
        with each.inserting_before(next(iter(each.nodes))):
            each.placeholder("run").meta["val"] = flag.meta["val"]
    return Conditional(region.name, region.graph, otherwise)


def _same(editor: Editor, x: fx.Node) -> fx.Node:
    return x


def _nothing(editor: Editor, x: fx.Node) -> fx.Node:
    return editor.call(aten.zeros_like.default, x)


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
