"""An exported program -> Program: parameters lifted out of the inputs, inputs and logits named."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from accel.ir.capture.encoder import INPUTS
from accel.ir.capture.export import Exported
from accel.ir.functional import unchanged, without_writes
from accel.ir.program import Program
from accel.ir.region import Entry
from accel.ir.weights import Weights

_DETACH = torch.ops.aten.detach_.default  # of a constant made in the forward: nothing is written


def convert(traced: Exported) -> Program:
    """Lift parameters out of the inputs; name the inputs, and the output logits."""
    with unchanged(traced.program.graph):  # it may be the user's
        return _converted(traced)


def _converted(traced: Exported) -> Program:
    exported = traced.program
    without_writes(exported.graph)
    if _needs_functions(exported.graph):
        exported = exported.run_decompositions({})
    signature = exported.graph_signature
    sources = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = {**exported.constants, **exported.state_dict, **traced.stored}
    users = [str(n) for n in signature.user_inputs]
    renames = dict(zip(users, traced.inputs, strict=False))
    graph, params = fx.Graph(), Weights()
    copied: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in sources:
            full = sources[node.name]
            name = traced.names.get(full, full).removeprefix(traced.prefix)
            value = tensors[full]
            params[name] = value.detach() if isinstance(value, Tensor) else value
            new = graph.create_node("get_attr", name)
        elif node.op == "placeholder":
            new = graph.placeholder(renames[node.name])
        elif node.op == "output":
            chosen = signature.user_outputs[traced.output]
            target = next(n for n in copied if n.name == chosen)
            graph.output((copied[target],))
            continue
        else:
            new = graph.node_copy(node, copied.__getitem__)
            if node.target is _DETACH:
                new.target = torch.ops.aten.detach.default
        new.meta = dict(node.meta)
        copied[node] = new
    if "positions" not in [n.target for n in graph.find_nodes(op="placeholder")]:
        _add_positions(graph)
    step = Entry(graph, ["logits"])
    dims: dict[str, str] = {}
    for name, letters in (("tokens", "BT"), (INPUTS, "BX")):
        if name in step.inputs:
            dims |= zip(map(str, step.input(name).meta["val"].shape), letters, strict=True)
    return Program(params, {"step": step}, traced.facts, dims=dims)


def _add_positions(graph: fx.Graph) -> None:
    tokens = next(iter(graph.find_nodes(op="placeholder")))
    with graph.inserting_after(tokens):
        node = graph.placeholder("positions")
    value = tokens.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty_like(value)


def _needs_functions(graph: fx.Graph) -> bool:
    """Whether the graph writes in place, holds sub-graphs or traced vmap, which decomposition removes."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is _DETACH:
            continue
        schema = getattr(node.target, "_schema", None)
        if isinstance(node.target, torch._ops.HigherOrderOperator) or (
            schema and schema.is_mutable
        ):
            return True
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            return True
    return False
