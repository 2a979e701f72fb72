"""What must hold between passes, written once and checked after each."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import MASKS, attention, operands_of
from accel.ir.program import Program
from accel.ir.region import Region, graphs_of


def verify(program: Program, where: str) -> None:
    """Raise PassError with every broken rule, naming the node."""
    broken: list[str] = []
    for graph in program.graphs():
        broken += _graph_rules(program, graph)
    broken += _state_rules(program) + _interface_rules(program)
    if broken:
        raise PassError(f"after {where} the program is not valid: " + "; ".join(broken[:5]))


def _graph_rules(program: Program, graph: fx.Graph) -> list[str]:
    broken: list[str] = []
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        late = [n.name for n in node.all_input_nodes if n not in seen]
        if late:
            broken.append(f"{node.name} reads {', '.join(late)} before it is computed")
        seen.add(node)
        if node.op == "get_attr" and node.target not in program.params:
            broken.append(f"{node.name} reads parameter '{node.target}', which does not exist")
        if node.op in ("call_function", "placeholder", "get_attr") and "val" not in node.meta:
            broken.append(f"{node.name} has no shape (meta['val']); insert it with Editor.call")
        if node.op in ("call_module", "call_method"):
            broken.append(
                f"{node.name} is a {node.op}; only function calls are allowed in a program"
            )
        if node.target is attention.default:
            broken += _attention_rules(node)
    return broken


def _attention_rules(node: fx.Node) -> list[str]:
    x = operands_of(node)
    q, k, v, q_pos, k_pos = (n.meta["val"] for n in (x.q, x.k, x.v, x.q_pos, x.k_pos))
    broken = []
    if not q.dim() == k.dim() == v.dim() == 4:
        broken.append(f"{node.name}: q, k, v must have axes [B,H,T,D]")
    elif q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        broken.append(
            f"{node.name}: {q.shape[1]} query heads over {k.shape[1]} and {v.shape[1]} KV heads"
        )
    if q_pos.dim() != 2 or k_pos.dim() != 2:
        broken.append(f"{node.name}: positions must have axes [B,T] and [B,S]")
    if x.mask not in MASKS:
        broken.append(f"{node.name}: mask {x.mask!r} is none of {MASKS}")
    return broken + _tree_rules(node)


def _tree_rules(node: fx.Node) -> list[str]:
    """`tree` [B,T,W] and `first` [B] come together."""
    x = operands_of(node)
    tree, first = x.tree, x.first
    if tree is None and first is None:
        return []
    if not isinstance(tree, fx.Node) or not isinstance(first, fx.Node):
        return [f"{node.name}: a tree needs the slot of the call's first key, and that a tree"]
    if tree.meta["val"].dtype is not torch.bool or tree.meta["val"].dim() != 3:
        return [f"{node.name}: a tree must be bool [B,T,W]"]
    return []


def _state_rules(program: Program) -> list[str]:
    broken = []
    step = program.step
    outputs = step.output_nodes()
    for state in program.state:
        name = state.name
        if state.shared:
            if name not in step.inputs:
                broken.append(f"state '{name}' is not an input of step")
            continue
        if state.read_only:
            writer = program.entries[state.writer]
            if name not in step.inputs or state.output not in writer.outputs:
                broken.append(
                    f"state '{name}' is not an output of {state.writer} and an input of step"
                )
            continue
        if name not in step.inputs or state.output not in outputs:
            broken.append(f"state '{name}' is not both an input and an output '{state.output}'")
            continue
        before, after = step.input(name).meta["val"], outputs[state.output].meta["val"]
        if str(before.shape) != str(after.shape) or before.dtype != after.dtype:
            broken.append(f"state '{name}' changes from {before.shape} to {after.shape}")
    return broken


def _interface_rules(program: Program) -> list[str]:
    broken = []
    logits = program.step.output_nodes().get("logits")
    value = logits.meta.get("val") if logits is not None else None
    if not isinstance(value, Tensor) or value.dim() != 3 or not value.is_floating_point():
        broken.append("step does not return logits [B,N,V]")
    for name in ("tokens", "positions"):
        if name not in program.step.inputs:
            broken.append(f"step has no input '{name}'")
    for node in program.nodes():
        if isinstance(node.target, Region):
            for graph in graphs_of(node.target):
                count = len(graph.find_nodes(op="placeholder"))
                if count != len(node.args):
                    broken.append(
                        f"{node.name} passes {len(node.args)} values to a region of {count}"
                    )
    if program.state and value is not None and value.dtype is not torch.float32:
        broken.append(f"logits are {value.dtype}, not float32")
    return broken
