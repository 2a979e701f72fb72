"""Recurrences over explicit state: values of fixed size, read at the start of a call, written at its end."""

from __future__ import annotations

import math
import operator
from collections import Counter
from typing import Any

from torch import fx

from accel.ir.ops.op import set_operand
from accel.ir.ops.recurrence import RECURRENT
from accel.ir.program import DTYPES, Editor, Program, State
from accel.ir.state import Part


def buffer(program: Program, editor: Editor, state: State, sizes: dict[str, Any]) -> fx.Node:
    """Declare a state value and its input."""
    program.state.append(state)
    shape = [sizes[d] if isinstance(d, str) else d for d in state.shape]
    return editor.placeholder(state.name, shape, DTYPES[state.dtype])


def carry(
    program: Program,
    editor: Editor,
    sites: list[fx.Node],
    letters: dict[str, Any],
    outputs: dict[str, fx.Node],
) -> int:
    """The recurrences of one layer: each starts from `recurrent.<layer>.<part>` [B, ...] and knows
    padding by its positions. Returns the bytes of state per row.
    """
    seen: Counter[str] = Counter()
    total = 0
    for node in sites:
        if node.target not in RECURRENT:
            continue
        part = str(node.target._schema.name).rpartition("::")[2]
        seen[part] += 1
        number = f".{seen[part] - 1}" if seen[part] > 1 else ""
        layer = node.meta["layer"]
        sizes = [int(d) for d in node.meta["val"][-1].shape[1:]]
        detail = f"{part}{number}"
        state = State(Part.RECURRENT, layer, "float32", ("B", *sizes), detail=detail)
        held = buffer(program, editor, state, letters)
        set_operand(node, "state", held)
        set_operand(node, "positions", program.step.input("positions"))
        outputs[state.output] = _after(editor, node)
        total += 4 * math.prod(sizes)
    return total


def _after(editor: Editor, node: fx.Node) -> fx.Node:
    """The state that a recurrence leaves: its last result."""
    place = len(node.meta["val"]) - 1
    found = [u for u in node.users if u.target is operator.getitem and u.args[1] == place]
    if found:
        return found[0]
    with editor.graph.inserting_after(node):
        return editor.call(operator.getitem, node, place, like=node)
