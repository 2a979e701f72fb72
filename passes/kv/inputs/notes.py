"""`notes` [B,G,S]: what a score computed for each token when it was cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from accel.ir.ops.attention import operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.ir.trace import trace
from accel.passes.kv.inputs import Input, Site, parameters
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Trained, source


class Notes(Input):
    """State `note.<layer>.recent [B,G,C]`, which the step appends to as it does to keys, and `note.<layer>.kept
    [B,G,P]`. The parameters of `note` name what it reads of a call, beside its trained tensors:

    | parameter | |
    |---|---|
    | `hidden` [B,T,E] | what keys are made of |
    | `queries` [B,H,T,D], `keys` [B,G,T,D], `values` [B,G,T,E] | of the call's tokens, after RoPE |
    | `positions` [B,T] | -1: padding |
    """

    names = ("notes",)

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        (score,) = (m for m in methods if hasattr(m, "note"))
        graph = program.step.graph
        editor, outputs = Editor(program, graph), program.step.output_nodes()
        appends = {s.layer: _node(operand_of(s.node, Part.KEYS)) for s in sites}
        keys = {layer: _node(operand_of(node, "new")) for layer, node in appends.items()}
        trained = score.tensors(program, keys) if isinstance(score, Trained) else {}
        for site in sites:
            layer, append = site.layer, appends[site.layer]
            old = _node(operand_of(append, "buffer"))
            batch, groups, slots = old.meta["val"].shape[:3]
            letter = f"P{layer}"
            letters = {"B": batch, "C": slots, letter: site.kept_values["pos"].meta["val"].shape[2]}
            recent = State(Part.NOTE, layer, "float32", ("B", int(sizes(old)[1]), "C"))
            kept = replace(recent, shape=("B", site.lists, letter), region=CacheRegion.KEPT)
            site.kept_values["notes"] = buffer(program, editor, kept, letters)
            site.kept_values["notes.recent"] = buffer(program, editor, recent, letters)
            x = operands_of(site.node)
            known = {"queries": x.q, "values": operand_of(x.v, "new"), "positions": x.q_pos}
            known |= {"hidden": source(keys[layer]), "keys": keys[layer]}
            known = {n: node for n, node in known.items() if n in parameters(score.note)}
            # queries may come after keys were stored
            with graph.inserting_before(append if set(known) == {"hidden"} else site.node):
                learnt = {
                    n: editor.param(f"note.{layer}.{n}", t)
                    for n, t in trained.get(layer, {}).items()
                }

                names = (*known, *learnt)

                def note(*values: Tensor, names: tuple[str, ...] = names) -> Tensor:
                    made: Tensor = score.note(**dict(zip(names, values, strict=True)))
                    return made.transpose(1, 2)

                made: Any = trace(
                    editor,
                    f"note.{layer}",
                    note,
                    *(*known.values(), *learnt.values()),
                    like=append,
                    key=("note", score, *names),
                )
                outputs[recent.output] = editor.call(
                    kv_append.default,
                    site.kept_values["notes.recent"],
                    made,
                    operand_of(append, "slots"),
                    like=append,
                )
        program.step.set_outputs(outputs)


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
