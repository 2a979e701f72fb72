"""What a build says of a program: the model's facts and the layout of its state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from accel.ir.facts import Facts
from accel.ir.kv import COARSE
from accel.ir.program import Program
from accel.ir.region import Region
from accel.ir.sizes import grows, per_slot
from accel.ir.state import Home, StateValue
from accel.ir.window import SLOTS
from accel.passes.weights._halves import is_lower


def model_facts(program: Program) -> Facts:
    """The program's facts, how many nodes each layer now has in the step, and the bytes of its weights."""
    regions = [n.target for n in program.nodes(entry=program.step) if isinstance(n.target, Region)]
    nodes = {r.name: len(r.graph.nodes) for r in regions}
    layers = enumerate(program.facts.layers)
    counted = [replace(layer, nodes=nodes.get(f"layer.{i}", 0)) for i, layer in layers]
    held = {name: program.params.stored(name).nbytes for name in program.params}
    coarse = COARSE in program.step.inputs
    finer = sum(size for name, size in held.items() if coarse and is_lower(name))
    return replace(
        program.facts, layers=counted, weight_bytes=sum(held.values()), finer_bytes=finer
    )


def state_json(program: Program) -> list[dict[str, Any]]:
    """Each state value."""
    return [s.to_json() for s in program.state]


def kv_mapped(program: Program) -> int:
    """How many bytes of `kv_bytes` the ONNX target keeps in mapped files."""
    mapped = [s for s in program.state if s.home is Home.MAPPED]
    return kv_bytes(replace(program, state=mapped))


def kv_bytes(program: Program) -> int:
    """Bytes of state that each token of a row takes; in blocks, where a codec makes such. Layers that keep the newest
    tokens only are left out.
    """
    block = program.facts.kv.flush if program.facts.kv is not None else 0
    return math.ceil(
        sum(
            per_slot(s.shape) * torch.empty((), dtype=getattr(torch, s.dtype)).element_size()
            for s in program.state
            if ("P" in s.shape if block else grows(s.shape) and not bounded(program.facts, s))
        )
        / max(1, block)
    )


def bounded(facts: Facts, value: StateValue) -> bool:
    """Whether a state value is of layers that keep the newest tokens only."""
    return facts.window is not None and SLOTS in value.shape
