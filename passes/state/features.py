"""The session of a trained head: features are given with tokens, and an entry makes them of what the target says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.draft_head import FEATURES, FUSE, TAP_ROWS, TAPS
from accel.ir.entries.embed import EMBED, EMBEDDED, EMBEDS
from accel.ir.ops.rows import given_rows
from accel.ir.program import Editor, Program
from accel.ir.region import Entry
from accel.passes import Pass, Report
from accel.passes.state.embedded import STREAM, tidy

aten = torch.ops.aten
_ROWS, _WIDTH = 67, 71  # example sizes while shapes are worked out


@dataclass(frozen=True)
class Features(Pass):
    """Of a head (`Facts.draft_head`): inputs `embeds [B,T,E+W]` and `embedded [B,T]` of the step, the embedding that
    the target has of each token (where the head has none of its own) and the features of the one before it. And entries

    `embed(tokens [B,T]) -> stream [B,T,E+W]`: numbers that stand in for both.
    `fuse(taps [B,T,F]) -> features [B,T,W]`: what the target's outputs become, where they are not features as they are.
    """

    stage = -1

    def run(self, program: Program) -> Report:
        head = program.facts.draft_head
        assert head is not None, "it comes with a head alone"
        if head.fused:
            program.entries[FUSE] = _part(program, 1, TAP_ROWS, FEATURES)
        program.entries[EMBED.name] = _part(program, 0, None, STREAM)
        step = program.step
        mixed = _mixed(step)
        editor = Editor(program, step.graph)
        shape = editor.symbol("R", _ROWS), editor.symbol("Q", _WIDTH)
        width = head.embedding + head.width
        rows = editor.placeholder(EMBEDS, (*shape, width), torch.float32)
        mask = editor.placeholder(EMBEDDED, shape, torch.bool)
        step.defaults[EMBEDS] = torch.zeros(1, 1, width)
        step.defaults[EMBEDDED] = torch.zeros(1, 1, dtype=torch.bool)
        mixed.args = (mixed.args[0], rows, mask)
        tidy(step)
        return Report(changed=1)


def _mixed(entry: Entry) -> fx.Node:
    """Where stand-ins meet what is fused of taps."""
    node: fx.Node
    (node,) = entry.graph.find_nodes(op="call_function", target=given_rows.default)
    return node


def _part(program: Program, place: int, table: str | None, name: str) -> Entry:
    """One of the two as an entry; taps in place of what looks them up in `table`."""
    entry = program.copy().step
    value: Any = _mixed(entry).args[place]
    if table is not None:
        if value.target is aten.cat.default:
            value = value.args[0][-1]
        lookups = entry.graph.find_nodes(op="call_function", target=aten.embedding.default)
        (looked,) = (n for n in lookups if str(n.args[0].target).endswith(table))
        found = looked.meta["val"]
        taps = Editor(program, entry.graph).placeholder(TAPS, found.shape, found.dtype)
        looked.replace_all_uses_with(taps)
        for node in entry.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            if node.args[0] is entry.input("tokens"):
                node.update_arg(0, taps)
    entry.set_outputs({name: value})
    tidy(entry)
    for holder in entry.graph.find_nodes(op="placeholder"):
        if not holder.users:
            entry.graph.erase_node(holder)
    entry.defaults = {}
    return entry
