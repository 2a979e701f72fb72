"""A step that takes trees of guesses, and an entry that keeps one path of such a tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.entries.commit import COMMIT
from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import Entry
from accel.ir.state import POSITIONS, Part
from accel.ir.trace import trace
from accel.ir.window import SLOTS, STAGE
from accel.passes import Pass, Report
from accel.passes.entry_inputs import EntryInputs
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.slots import filled, positions_name

_WIDTH, _PATH = 73, 79  # example sizes while shapes are worked out


@dataclass(frozen=True)
class Trees(Pass):
    """An input `tree [B,T,W]` of the step says which of the call's own slots each token sees, W = T; by default
    W = 1, and the call is a row of tokens. And a new entry

    `commit(slots [B], path [B,N], positions [B,N]) -> state`: slot slots[b] + i gets what slot slots[b] + path[b,i]
    held, and the position positions[b,i] (-1: nothing lies there any more).

    Layers of a head that are `DraftHead.causal` see of the call's own slots those before alone, whatever a tree says.
    """

    after = (Cache, Head)
    must_change = True
    flat = True
    stage = 5  # after all that changes what is kept

    def run(self, program: Program) -> Report:
        step, editor = program.step, Editor(program, program.step.graph)
        written = step.output_nodes()
        for state in program.state:
            _check(state, written)
        places = {written[s.output] for s in program.state if s.positions}
        sites = program.nodes(attention.default, entry=step)
        own = [n for n in sites if operands_of(n).k_pos in places]
        wide = editor.symbol("W", _WIDTH)
        batch, width = step.input("tokens").meta["val"].shape
        tree = editor.placeholder("tree", (batch, width, wide), torch.bool)
        step.defaults["tree"] = torch.ones(1, 1, 1, dtype=torch.bool)
        head = program.facts.draft_head
        causal = () if head is None else head.causal
        if causal:
            with step.graph.inserting_before(own[0]):
                before = trace(editor, "tree", _before, tree, key="before")
        for node in own:
            first = operand_of(operands_of(node).k_pos, "slots")
            seen = before if node.meta.get("layer") in causal else tree
            node.kwargs = {**node.kwargs, "tree": seen, "first": first}
        program.entries[COMMIT.name] = _commit(program, batch)
        return Report(changed=len(own))


def _before(tree: Tensor) -> Tensor:
    """Of a tree [B,T,W] what is not behind each token."""
    width, wide = tree.shape[1:]
    return tree & (torch.arange(wide) <= torch.arange(width)[:, None])


def _check(state: State, written: dict[str, fx.Node]) -> None:
    """Raise PassError where guesses that are dropped would leave a trace in a state."""
    new = written.get(state.output)
    if state.shared:
        raise PassError(
            "kv.reuse shares token blocks between sessions, which do not support draft trees yet; "
            "leave kv.reuse out, or draft a chain"
        )
    if state.part in (Part.PAGES, Part.UNITS, Part.CHOICE):
        raise PassError(
            "kv.select keeps bounds of pages, units or choices, which rejected tokens of a tree would change; leave "
            "kv.select out, or draft a chain"
        )
    if not (
        state.cross
        or state.written_between_steps
        or (new is not None and new.target is kv_append.default)
    ):
        raise PassError(
            f"'{state.name}' is not per-token state, so rejected tokens of a tree cannot be removed "
            "from it; draft a chain"
        )


def _commit(program: Program, batch: Any) -> Entry:
    """The entry over all state that the step appends to."""
    graph = fx.Graph()
    inputs = EntryInputs(program, graph)
    count, slots = inputs.source.symbol("N", _PATH), inputs.new("slots", batch)
    path, positions = (inputs.new(name, batch, count) for name in ("path", "positions"))
    states = [s for s in program.state if s.output in program.step.outputs]
    buffers = {s.name: inputs.shared(s.name) for s in states}
    editor, outputs = Editor(program, graph), {}
    first = {"C": slots}
    if (own := buffers.get(positions_name(STAGE))) is not None:
        operands = own, buffers[POSITIONS], slots
        first[SLOTS] = trace(editor, positions_name(STAGE), filled, *operands, key="filled")
    for state in states:
        buffer, start = buffers[state.name], next(first[n] for n in state.shape if n in first)
        if state.positions:
            outputs[state.output] = editor.call(kv_append.default, buffer, positions, start)
        else:
            key = "commit", buffer.meta["val"].dim()
            outputs[state.output] = trace(
                editor, state.name, partial(_along, rank=key[1]), buffer, start, path, key=key
            )
    graph.output(tuple(outputs.values()))
    return Entry(graph, list(outputs))


def _along(buffer: Tensor, slots: Tensor, path: Tensor, rank: int) -> Tensor:
    """buffer [B,G,C,..] whose slots from slots [B] on hold those of a path [B,N], counted from there."""
    index = (slots[:, None] + path)[:, None].unflatten(2, (-1, *[1] * (rank - 3)))
    shape = (path.shape[0], buffer.shape[1], path.shape[1], *buffer.shape[3:])
    taken = torch.gather(buffer, 2, index.expand(shape))
    appended: Tensor = kv_append(buffer, taken, slots)
    return appended
