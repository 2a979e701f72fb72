"""`notes` [B,G,S]: what a score computed for each token when it was cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.ir.trace import trace
from accel.passes.kv.inputs import Input, Site
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Trained, source


class Notes(Input):
    """State `note.<layer>.recent [B,G,C]`, which the step appends to as it does to keys, and `note.<layer>.kept
    [B,G,P]`.
    """

    names = ("notes",)

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        (score,) = (m for m in methods if hasattr(m, "note"))
        graph = program.step.graph
        editor, outputs = Editor(program, graph), program.step.output_nodes()
        appends = {s.layer: _node(operand_of(s.node, Part.KEYS)) for s in sites}
        keys = {layer: _node(operand_of(node, "new")) for layer, node in appends.items()}
        trained = score.parts(program, keys) if isinstance(score, Trained) else {}
        for site in sites:
            layer, append = site.layer, appends[site.layer]
            old = _node(operand_of(append, "buffer"))
            batch, groups, slots = old.meta["val"].shape[:3]
            letter = f"P{layer}"
            letters = {"B": batch, "C": slots, letter: site.kept["pos"].meta["val"].shape[2]}
            recent = State(Part.NOTE, layer, "float32", ("B", int(sizes(old)[1]), "C"))
            kept = replace(recent, shape=("B", int(sizes(old)[1]), letter), region=CacheRegion.KEPT)
            site.kept["notes"] = buffer(program, editor, kept, letters)
            site.kept["notes.recent"] = buffer(program, editor, recent, letters)
            hidden = source(keys[layer])
            with graph.inserting_before(append):
                weights = {
                    n: editor.param(f"note.{layer}.{n}", t)
                    for n, t in trained.get(layer, {}).items()
                }

                def note(
                    x: Tensor, *values: Tensor, names: tuple[str, ...] = tuple(weights)
                ) -> Tensor:
                    made: Tensor = score.note(x, **dict(zip(names, values, strict=True)))
                    return made.transpose(1, 2)

                key = "note", score, *weights
                made: Any = trace(
                    editor, f"note.{layer}", note, hidden, *weights.values(), like=append, key=key
                )
                outputs[recent.output] = editor.call(
                    kv_append.default,
                    site.kept["notes.recent"],
                    made,
                    operand_of(append, "slots"),
                    like=append,
                )
        program.step.set_outputs(outputs)


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
