"""ShortGPT (arXiv:2403.03853): delete the layers with the lowest block influence."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Program, evaluate
from accel.ir.region import Region
from accel.ir.state import output_of, state_of
from accel.passes import Report
from accel.passes.calibrate import feeds
from accel.passes.clean.clean import forget_unused, remove_dead
from accel.passes.depth import Base
from accel.passes.depth._joint import layers
from accel.passes.weights._calibrated import calibration_of


@dataclass(frozen=True)
class ShortGPT(Base):
    """Deletes the fraction `share` of the layers, with weights and caches; the first and the last layer stay.

    The block influence of a layer is 1 - cos(before, after) of the residual stream, averaged over `tokens` tokens of
    the calibration text without the first of each row, which many models use as an attention sink.
    """

    share: float = option(0.25, least=0, below=1)
    tokens: int = option(8192, least=1)

    stage = -1  # before weights are stored otherwise
    reads_text = True
    breaks = frozenset({Invariant.FIXED_LAYERS})
    provides = frozenset()
    error = 10.0  # other models; that one without the layers is what is left, the laws of this axis hold
    small: ClassVar[Mapping[str, Any]] = {"share": 0.4, "tokens": 5}

    def run(self, program: Program) -> Report:
        if program.facts.adapters is not None:
            raise PassError(
                "shortgpt: it deletes layers, of which adapters that sessions choose have weights; merge one adapter "
                "(merge_adapter), or leave shortgpt out"
            )
        calls = layers(program)
        count = int(self.share * len(calls))
        if count == 0:
            return Report(refused=[f"{self.share:g} of {len(calls)} layers is none"])
        if count > len(calls) - 2:
            raise PassError(
                f"shortgpt: {self.share:g} of {len(calls)} layers are {count}, but the first and the "
                f"last layer stay; give a share of at most {(len(calls) - 2) / len(calls):.3g}"
            )
        scores = influence(program, calls, self.tokens)
        gone = sorted(sorted(range(1, len(calls) - 1), key=lambda i: scores[i])[:count])
        delete(program, calls, gone)
        told = ", ".join(f"{i} ({scores[i]:.3f})" for i in gone)
        program.facts.notes.append(f"shortgpt deleted layers {told} of {len(calls)} (influence)")
        return Report(changed=count)


def influence(program: Program, calls: list[fx.Node], tokens: int) -> list[float]:
    """1 - mean cos(before, after) of each layer, in float32."""
    text = calibration_of(program).tokens[:, : program.facts.max_context]
    streams = [*(call.args[0] for call in calls), _stream(calls[-1])]
    sums, counted = torch.zeros(len(calls), dtype=torch.float64), 0
    for row in text[: max(1, tokens // text.shape[1])].split(1):
        given = feeds(program, "step", row)
        with torch.no_grad():
            states: list[Tensor] = evaluate(streams, program.params, given)  # type: ignore[arg-type]
        first = int(row.shape[1] > 1)
        for i, (before, after) in enumerate(zip(states, states[1:], strict=False)):
            near = F.cosine_similarity(before.float(), after.float(), dim=-1)[:, first:]
            sums[i] += near.nan_to_num(0.0).sum().double()
        counted += row.shape[1] - first
    return [float(1 - s / counted) for s in sums]


def delete(program: Program, calls: list[fx.Node], gone: list[int]) -> None:
    """Take layers out of the step; those that stay are numbered anew, with their state."""
    for index in gone:
        call = calls[index]
        for item in list(call.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(call.args[0])  # type: ignore[arg-type]
    lost = {s.name for s in program.state if s.layer in gone}
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
    names: dict[str, str] = {}
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
    return output_of(names[state]) if state in names else output


def _stream(call: fx.Node) -> fx.Node:
    """The residual stream after a layer."""
    return next(u for u in call.users if u.target is operator.getitem and u.args[1] == 0)
