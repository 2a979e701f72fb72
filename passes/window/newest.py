"""Layers with a sliding window keep the newest tokens only, as the caches of llama.cpp, vLLM and transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import set_operand
from accel.ir.program import Editor, Program
from accel.ir.state import POSITIONS, Part, name_of, output_of
from accel.ir.window import SLOTS, STAGE, Window
from accel.passes import Report
from accel.passes.state.slots import own_positions, positions_name
from accel.passes.window import Base
from accel.passes.window._layers import readers, window_of


@dataclass(frozen=True)
class Newest(Base):
    """Their keys and values lie in slots of their own. Where a call needs more than window + 2 `back` of them, all
    tokens but the newest window - 1 + `back` are dropped first; no later token sees the others. So the cache of such a
    layer is bounded by the window and one call, and `back` of the newest tokens can always be rewound.

    Of windows of several sizes the largest counts for all. A layer whose window is about the maximum context keeps all
    tokens, and so does one whose cache a layer without a window reads.
    """

    back: int = option(128, least=1)
    small: ClassVar[Mapping[str, Any]] = {"back": 8}

    by_position = True
    must_change = True
    advice: ClassVar[str] = "; leave window out for this model"
    relies = frozenset(
        {
            Invariant.ALL_LAYERS_RUN,
            Invariant.APPEND_ONLY,
            Invariant.CALL_INDEPENDENT,
            Invariant.FIXED_LAYERS,
            Invariant.FULL_ATTENTION,
        }
    )
    breaks = frozenset(
        {
            Invariant.ALL_TOKENS_HELD,
            Invariant.BATCH_INVARIANCE,
            Invariant.TOKENS_CONTIGUOUS,
            Invariant.UNIFORM_SLOTS,
        }
    )

    def run(self, program: Program) -> Report:
        if program.facts.both_ways or any(s.part is Part.RECURRENT for s in program.state):
            return Report(
                refused=[
                    "sessions of this model run tokens again that its layers with a window would no longer see"
                    f"{self.advice}"
                ]
            )
        read = readers(program)
        windows = {layer: window_of(nodes) for layer, nodes in read.items()}
        windows = {
            layer: size
            for layer, size in windows.items()
            if size and size + 2 * self.back < program.facts.max_context
        }
        if not windows:
            return Report(
                refused=[
                    f"no layer sees a window that is shorter by {2 * self.back} tokens than the maximum context of "
                    f"{program.facts.max_context}{self.advice}"
                ]
            )
        _move(program, {layer: read[layer] for layer in windows})
        program.facts.window = Window(max(windows.values()), self.back)
        program.facts.notes.append(
            f"{len(windows)} of {len(program.facts.layers)} layers keep the newest tokens of their window only"
        )
        return Report(changed=len(windows))


def _move(program: Program, read: Mapping[int, list[fx.Node]]) -> None:
    """Let the caches of some layers have slots of their own."""
    step = program.step
    shared = step.output_nodes()[output_of(POSITIONS)]
    at, positions = own_positions(program, STAGE, shared)
    editor = Editor(program, step.graph)
    slots = step.input(positions_name(STAGE)).meta["val"].shape[1]
    names = {name_of(part, layer) for layer in read for part in (Part.KEYS, Part.VALUES)}
    for index, state in enumerate(program.state):
        if state.name not in names:
            continue
        sizes = tuple(SLOTS if size == "C" else size for size in state.shape)
        program.state[index] = replace(state, shape=sizes)
        buffer = step.input(state.name)
        old = buffer.meta["val"]
        shape = [slots if size == SLOTS else n for size, n in zip(sizes, old.shape, strict=True)]
        with editor.fake:
            buffer.meta["val"] = old.new_empty(shape)
        for stored in list(buffer.users):
            if stored.target is kv_append.default:
                set_operand(stored, "slots", at)
                stored.meta["val"] = editor.value(stored)
    for nodes in read.values():
        for node in nodes:
            set_operand(node, "k_pos", positions)
