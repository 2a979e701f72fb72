"""The joint of layers that hold the tokens alone that they took: the cache of each has holes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.depth import RUN_LAYERS
from accel.ir.errors import PassError
from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, Program, State
from accel.ir.state import POSITIONS, Part, output_of
from accel.ir.trace import trace
from accel.passes.depth._joint import layer_flags, layers, leave_out
from accel.passes.state.recurrent import buffer

aten = torch.ops.aten
Taken = Callable[[Editor, int, fx.Node], fx.Node]  # bools [B,T]: of a layer, and the stream before


def written(program: Program) -> fx.Node:
    """The positions [B,C] of all slots behind a call's tokens."""
    return program.step.output_nodes()[output_of(POSITIONS)]


def holes(program: Program, taken: Taken) -> list[fx.Node]:
    """Put each layer under its element of a new input `run_layers` and let it take some tokens alone: it runs where it
    takes one, changes their streams, and only they are read in its cache. The state `note.<layer>.recent [B,1,C]` says
    of each slot whether the layer took it. Returns the layers' calls. Raises PassError.
    """
    calls, step = layers(program), program.step
    _check(program, calls)
    editor, outputs = Editor(program, step.graph), dict(step.output_nodes())
    every, held = written(program), step.input(POSITIONS).meta["val"]
    letters = {"B": held.shape[0], "C": held.shape[1]}
    for layer, (call, flag) in enumerate(
        zip(calls, layer_flags(program, RUN_LAYERS, calls), strict=True)
    ):
        before: Any = call.args[0]
        state = State(Part.NOTE, layer, "float32", ("B", 1, "C"))
        old = buffer(program, editor, state, letters)
        with step.graph.inserting_before(call):
            tokens = editor.call(aten.logical_and.default, taken(editor, layer, before), flag)
            some = editor.call(aten.any.default, tokens)
            new = editor.call(aten._to_copy.default, tokens, dtype=torch.float32)
            new = editor.call(aten.unsqueeze.default, new, 1)
            noted = editor.call(kv_append.default, old, new, step.input("slots"))
            own: Any = trace(editor, "holes", seen, noted, every, key=("holes",))
        outputs[state.output] = noted
        call.args = tuple(own if a is every else a for a in call.args)
        leave_out(program, call, some, tokens)
    step.set_outputs(outputs)
    return calls


def seen(noted: Tensor, positions: Tensor) -> Tensor:
    """Positions [B,C] of the slots that a layer took [B,1,C], -1 of others."""
    return torch.where(noted[:, 0] > 0, positions, -1)


def _check(program: Program, calls: list[fx.Node]) -> None:
    every = written(program)
    if "commit" in program.entries:
        raise PassError(
            "depth: a draft tree moves slots of keys and values, but layers with holes have slots of their own "
            "reading; draft chains (tree = chain)"
        )
    for layer, (call, facts) in enumerate(zip(calls, program.facts.layers, strict=True)):
        if facts.shares is not None:
            raise PassError(
                f"depth: layer {layer} reads the keys of layer {facts.shares}, which takes other tokens; choose a "
                "target other than block"
            )
        if every not in call.args:
            raise PassError(
                f"depth: layer {layer} reads a cache with slots of its own, whose tokens a layer cannot leave out; "
                "choose a target other than block"
            )
