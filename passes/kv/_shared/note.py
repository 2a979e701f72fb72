"""What a score notes of each token when it is cached: state beside its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part, name_of
from accel.ir.trace import trace
from accel.passes.kv.score import Base as Score
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Trained, source


def add_notes(
    program: Program, score: Score, stored: Mapping[int, fx.Node]
) -> dict[int, dict[str, fx.Node]]:
    """`note.<layer>.recent [B,G,C]`, which the step appends to as it does to keys, and `note.<layer>.kept
    [B,G,P]`. `stored`: the append of each layer's keys. Gives the buffers of each layer.
    """
    graph = program.step.graph
    editor, outputs = Editor(program, graph), program.step.output_nodes()
    keys = {layer: _node(operand_of(node, "new")) for layer, node in stored.items()}
    trained = score.parts(program, keys) if isinstance(score, Trained) else {}
    found: dict[int, dict[str, fx.Node]] = {}
    for layer, append in stored.items():
        old = _node(operand_of(append, "buffer"))
        groups, batch, slots = (
            int(sizes(old)[1]),
            old.meta["val"].shape[0],
            old.meta["val"].shape[2],
        )
        letter = f"P{layer}"
        kept = (
            program.step.input(name_of(Part.POSITIONS, layer, CacheRegion.KEPT))
            .meta["val"]
            .shape[2]
        )
        letters = {"B": batch, "C": slots, letter: kept}
        recent = State(Part.NOTE, layer, "float32", ("B", groups, "C"))
        later = replace(recent, shape=("B", groups, letter), region=CacheRegion.KEPT)
        here = found[layer] = {
            "notes": buffer(program, editor, later, letters),
            "notes.recent": buffer(program, editor, recent, letters),
        }
        hidden = source(keys[layer])
        with graph.inserting_before(append):
            weights = {
                n: editor.param(f"note.{layer}.{n}", t) for n, t in trained.get(layer, {}).items()
            }

            def note(x: Tensor, *values: Tensor, names: tuple[str, ...] = tuple(weights)) -> Tensor:
                return score.note(x, **dict(zip(names, values, strict=True))).transpose(1, 2)

            key = "note", score, *weights
            made: Any = trace(
                editor, f"note.{layer}", note, hidden, *weights.values(), like=append, key=key
            )
            written = editor.call(
                kv_append.default,
                here["notes.recent"],
                made,
                operand_of(append, "slots"),
                like=append,
            )
        outputs[recent.output] = written
    program.step.set_outputs(outputs)
    return found


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
