"""Embeddings of ids behind the vocabulary, which the output head does not know: of pauses, of masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.ir.errors import PassError
from accel.ir.extra_ids import ExtraIds
from accel.ir.ops.rows import given_rows, lookup
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.state.embedded import embedding_of
from accel.passes.state.layers import Layers
from accel.passes.trained import ALL, first_product, read

aten = torch.ops.aten
ROWS = "rows"  # of the trained part: [N,E]


@dataclass(frozen=True)
class ExtraIdsPass(Pass):
    """The step reads ids [V,V+N), whose embeddings are the rows [N,E] of a method's trained part. Others are read as
    before.

        embedding(tokens)  ->  where(tokens >= V, rows[tokens - V], embedding(min(tokens, V - 1)))

    of: the method, with `full_name`, and `key` and `trained` as of `Trained`. count: N.
    """

    of: Any
    count: int = 1

    after = (Layers,)  # else what a first layer makes of tokens alone reads them, too
    must_change = True
    stage = -1  # before weights are stored otherwise, by which the part's model is known

    @property
    def method(self) -> Any:
        return self.of

    def run(self, program: Program) -> Report:
        check(program, self.of.full_name)
        value = embedding_of(program.step, self.of.full_name)
        shape = (self.count, int(sizes(value)[2]))
        numbers = first_product(program, program.step)
        rows = read(self.of, program.facts.name, numbers, {ALL: {ROWS: shape}})[ALL][ROWS]
        lay(program, rows, self.of.full_name)
        return Report(changed=1)


def check(program: Program, method: str) -> None:
    """Raise PassError where no prompt comes before what a model says."""
    facts = program.facts
    if facts.both_ways or facts.embedding is not None:
        raise PassError(
            f"{method}: tokens of this model see later ones, or it makes no text, so nothing comes between a prompt "
            f"and an answer; leave {method} out for it"
        )
    if facts.encoder is not None:
        raise PassError(
            f"{method}: the prompt of an encoder-decoder is a few start tokens; leave {method} out for it"
        )


def lay(program: Program, rows: Tensor, method: str) -> None:
    """Let the step read as many ids behind its vocabulary, and such that are there already, as there are rows [N,E]."""
    step, size = program.step, program.facts.token_ids
    value, tokens = embedding_of(step, method), step.input("tokens")
    editor = Editor(program, step.graph)
    with step.graph.inserting_before(tokens.next):
        low = editor.call(aten.clamp_max.default, tokens, size - 1)
        place = editor.call(aten.sub.Tensor, tokens, size)
        extra = editor.call(aten.ge.Scalar, tokens, size)
    new = {low, place, extra}
    tokens.replace_all_uses_with(
        low, delete_user_cb=lambda n: n not in new and n.target is not aten.sym_size.int
    )
    with step.graph.inserting_before(value.next):
        table = editor.param(f"extra_ids.{size}", rows)
        looked = editor.call(lookup.default, table, place)
        mixed = editor.call(given_rows.default, value, looked, extra)
    value.replace_all_uses_with(
        mixed, delete_user_cb=lambda n: n is not mixed and n.target is not aten.sym_size.int
    )
    count = size + len(rows) - program.facts.vocab_size
    program.facts.extra_ids = ExtraIds(count)
