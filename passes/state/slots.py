"""Slots that some layers have of their own, beside those of the step."""

from __future__ import annotations

from torch import Tensor, fx

from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, Program, State
from accel.ir.state import POSITIONS, Part, name_of
from accel.ir.trace import trace
from accel.passes.state.recurrent import buffer

_SLOTS = 73  # example number of slots while shapes are worked out


def filled(pos: Tensor, first: Tensor, start: Tensor) -> Tensor:
    """How many slots of `pos` [B,C1] hold tokens before a call [B], whose first slot of the step's `first` [B,C] is
    `start` [B]: those up to the newest token before it.
    """
    last = first.gather(1, (start - 1).clamp(min=0)[:, None])
    return ((pos >= 0) & (pos <= last) & (start > 0)[:, None]).sum(1)


def own_positions(program: Program, stage: int, before: fx.Node) -> tuple[fx.Node, fx.Node]:
    """State `kv.pos.<stage> [B,C<stage>]`, which the step writes from a slot on, [B]: that slot, as many as hold
    earlier tokens, and the positions after the call. The nodes are inserted before a node of the step.
    """
    step = program.step
    editor, outputs = Editor(program, step.graph), step.output_nodes()
    letter = f"C{stage}"
    state = State(Part.POSITIONS, None, "int64", ("B", letter), -1, detail=str(stage))
    batch = step.input(POSITIONS).meta["val"].shape[0]
    letters = {"B": batch, letter: editor.symbol(letter, _SLOTS + stage)}
    held = buffer(program, editor, state, letters)
    with step.graph.inserting_before(before):
        shared = step.input(POSITIONS), step.input("slots")
        at = trace(editor, state.name, filled, held, *shared, key="filled")
        positions = editor.call(kv_append.default, held, step.input("positions"), at)
    step.set_outputs({**outputs, state.output: positions})
    return at, positions


def positions_name(stage: int) -> str:
    """The state of the positions in the slots of a stage; 0: those of the step."""
    return name_of(Part.POSITIONS, detail=str(stage or ""))
