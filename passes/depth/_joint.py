"""The joints: every layer of the step under a condition, an element of the input `run_layers [L]`; a layer that some
tokens take.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import fx

from accel.ir.depth import PROPAGATE
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Region, layer_calls, sizes
from accel.ir.state import Part, state_of
from accel.passes.clean.clean import remove_dead
from accel.passes.depth._narrow import narrow

aten = torch.ops.aten
PLAN = "run_layers"


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
    recurrent = [s.layer for s in program.state if s.part is Part.RECURRENT]
    if recurrent:
        raise PassError(
            f"depth: layer {recurrent[0]} has a recurrent state, which a rewind recomputes from "
            "the tokens without knowing which layers each token ran; build without a depth method"
        )
    calls = layers(program)
    graph = program.step.graph
    editor = Editor(program, graph)
    plan = editor.placeholder(PLAN, (len(calls),), torch.bool)
    program.step.defaults[PLAN] = torch.ones(len(calls), dtype=torch.bool)
    for index, call in enumerate(calls):
        with graph.inserting_before(call):
            flag = editor.call(aten.select.int, plan, 0, index)
        _condition(program, call, flag, cache)
    return calls


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
    written = [_state(program, call, i) for i in range(len(call.meta["val"]))]
    otherwise = deepcopy(region.graph)
    given = {str(h.target): h for h in otherwise.find_nodes(op="placeholder")}
    (out,) = otherwise.find_nodes(op="output")
    kept = out.args[0]
    x = next(iter(given.values()))
    if cache == PROPAGATE:
        out.args = ((x, *kept[1:]),)
        remove_dead(otherwise)
        narrow(program, otherwise)
    else:
        out.args = ((x, *(given[name] for name in written[1:])),)
        remove_dead(otherwise)
    for each in (region.graph, otherwise):
        first = next(iter(each.nodes))
        with each.inserting_before(first):
            each.placeholder("run").meta["val"] = flag.meta["val"]
    call.target = Conditional(region.name, region.graph, otherwise)
    call.args = (flag, *call.args)


def _state(program: Program, call: fx.Node, index: int) -> str:
    """The state value that a result of a layer is the next of; "" for the residual stream."""
    items = [u for u in call.users if u.target is operator.getitem and u.args[1] == index]
    names = [n for n, node in program.step.output_nodes().items() if node in items]
    return state_of(names[0]) if names else ""


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
