"""A step that takes embeddings in place of tokens, and an entry that gives those of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel.ir.entries.embed import EMBED, EMBEDDED, EMBEDS
from accel.ir.invariants import Method
from accel.ir.ops.rows import given_rows
from accel.ir.program import Editor, Program
from accel.passes import Pass, Report
from accel.passes.state.embedded import embedding_of, embeddings
from accel.passes.state.layers import Layers

_ROWS, _WIDTH = 67, 71  # example sizes while shapes are worked out


@dataclass(frozen=True)
class Embeds(Pass):
    """Inputs `embeds [B,T,E]` and `embedded [B,T]` of the step: rows that stand for the embeddings of a call's tokens,
    and for which of them; by default for none. And a new entry

    `embed(tokens [B,T]) -> stream [B,T,E]`: the embeddings of tokens, as the step has them.

    reader: the method that reads embeddings. Where its calls give none (`Method.gives_embeds`), layers may read tokens
    in other ways beside.
    """

    reader: Method

    after = (Layers,)  # else what a first layer makes of tokens alone reads them, too
    must_change = True
    stage = -1  # before layers are left out

    def run(self, program: Program) -> Report:
        step = program.step
        asked = self.reader.full_name, self.reader.gives_embeds
        entry = embeddings(program, *asked)
        for holder in entry.graph.find_nodes(op="placeholder"):
            if not holder.users:
                entry.graph.erase_node(holder)
        entry.defaults = {}
        value = embedding_of(step, *asked)
        editor = Editor(program, step.graph)
        shape = editor.symbol("R", _ROWS), editor.symbol("Q", _WIDTH)
        width = value.meta["val"].shape[2]
        rows = editor.placeholder(EMBEDS, (*shape, width), torch.float32)
        given = editor.placeholder(EMBEDDED, shape, torch.bool)
        step.defaults[EMBEDS] = torch.zeros(1, 1, int(width))
        step.defaults[EMBEDDED] = torch.zeros(1, 1, dtype=torch.bool)
        with step.graph.inserting_after(value):
            mixed = editor.call(given_rows.default, value, rows, given)
        value.replace_all_uses_with(
            mixed,
            delete_user_cb=lambda n: n is not mixed and n.target is not torch.ops.aten.sym_size.int,
        )
        program.entries[EMBED.name] = entry
        return Report(changed=1)
