"""Deleting layers, with weights and caches; those that stay are numbered anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from accel.ir.entries.shift import keys_of, turned_of
from accel.ir.program import Program
from accel.ir.region import Region
from accel.ir.state import output_of, state_of
from accel.passes.clean.clean import forget_unused, remove_dead

BY_LAYER = (keys_of, turned_of)  # inputs and outputs of entries that are of a layer, and no state


def remove(program: Program, calls: Sequence[fx.Node], gone: Sequence[int]) -> None:
    """Take layers out of the step; those that stay are numbered anew, with their state."""
    for index in gone:
        call = calls[index]
        for item in list(call.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(call.args[0])  # type: ignore[arg-type]
    lost = {s.name for s in program.state if s.layer in gone}
    lost |= {name(i) for name in BY_LAYER for i in gone}
    for entry in program.entries.values():  # of an encoder, the keys of cross-attention
        kept = {n: v for n, v in entry.output_nodes().items() if state_of(n) not in lost}
        entry.set_outputs(kept)
    for index in gone:
        for item in list(calls[index].users):
            item.graph.erase_node(item)
        calls[index].graph.erase_node(calls[index])
    for entry in program.entries.values():
        remove_dead(entry.graph)
        for name in lost.intersection(entry.inputs):
            entry.graph.erase_node(entry.input(name))
    before = set(program.params)
    sizes = {name: program.params.blank(name).numel() for name in before}
    forget_unused(program)
    program.facts.parameters -= sum(sizes[name] for name in before - set(program.params))
    _renumber(program, [i for i in range(len(calls)) if i not in gone], lost)


def _renumber(program: Program, stay: list[int], lost: set[str]) -> None:
    """Layers, their state and what belongs to them count from 0 again."""
    step = program.step
    places = {old: new for new, old in enumerate(stay)}
    names = {name(old): name(new) for name in BY_LAYER for old, new in places.items()}
    state = []
    for value in program.state:
        if value.name in lost:
            continue
        if value.layer is not None:
            new = replace(value, layer=places[value.layer])
            names[value.name], value = new.name, new
        state.append(value)
    program.state = state
    program.facts.layers = [program.facts.layers[i] for i in stay]
    for graph in program.graphs():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.target = names.get(str(node.target), node.target)
            if node.meta.get("layer") in places:
                node.meta["layer"] = places[node.meta["layer"]]
    for entry in program.entries.values():
        found = entry.output_nodes()
        entry.set_outputs({_renamed(name, names): node for name, node in found.items()})
    regions = [n.target for n in step.graph.nodes if isinstance(n.target, Region)]
    for index, region in enumerate(regions):
        region.name = f"layer.{index}"


def _renamed(output: str, names: dict[str, str]) -> str:
    state = state_of(output)
    if output == state:  # of no state
        return names.get(output, output)
    return output_of(names[state]) if state in names else output
