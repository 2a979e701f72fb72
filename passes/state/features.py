"""The session of a trained head: features are given with tokens, and an entry makes them of what the target says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.draft_head import (
    BIAS,
    CANDIDATE_ROWS,
    CANDIDATES,
    CONFIDENCE,
    FEATURES,
    FUSE,
    HIDDEN,
    HIDDEN_ROWS,
    MARKOV,
    NEXT_STATE,
    STATE,
    STATE_ROWS,
    TAP_ROWS,
    TAPS,
    DraftHead,
)
from accel.ir.entries.embed import EMBED, EMBEDDED, EMBEDS
from accel.ir.ops.rows import given_rows, take_rows
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
    `markov(tokens [B,T], hidden [B,T,H], state [B,T,S]) -> bias [B,T,V], confidence [B,T,1], next_state [B,T,S]`: what
    the token before adds to logits, how sure that is, and what goes on to the next place, where `DraftHead` has them.
    Where it has candidates, they are an input, too, `candidates [B,T,K]`, and what is added is theirs, `bias [B,T,K]`.
    """

    stage = -1

    def run(self, program: Program) -> Report:
        head = program.facts.draft_head
        assert head is not None, "it comes with a head alone"
        if head.fused:
            program.entries[FUSE] = _part(program, 1, TAP_ROWS, FEATURES)
        if head.markov:
            program.entries[MARKOV] = _markov(program, head)
            _leave_out_markov(program.step)
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
    node: fx.Node = entry.graph.find_nodes(op="call_function", target=given_rows.default)[0]
    return node


def _markov_rows(entry: Entry) -> fx.Node:
    """Where what the token before changes is laid beside the step's output."""
    node: fx.Node = entry.graph.find_nodes(op="call_function", target=given_rows.default)[-1]
    return node


def _markov(program: Program, head: DraftHead) -> Entry:
    """What the token before changes, of a hidden state and a state in place of what looks them up."""
    entry = program.copy().step
    parts: Any = _markov_rows(entry).args[1]
    if parts.target is take_rows.default:
        parts = parts.args[0]
    names = [BIAS, *[CONFIDENCE] * head.confident, *[NEXT_STATE] * (head.state > 0)]
    found = dict(zip(names, parts.args[0], strict=False))
    if head.hidden:
        _given(program, entry, HIDDEN_ROWS, HIDDEN)
    if head.state:
        _given(program, entry, STATE_ROWS, STATE)
    if head.candidates:
        _given(program, entry, CANDIDATE_ROWS, CANDIDATES)
    entry.set_outputs(found)
    _trim(entry)
    return entry


def _leave_out_markov(step: Entry) -> None:
    """Of the step, which does not depend on it."""
    rows = _markov_rows(step)
    output = rows.args[0]
    assert isinstance(output, fx.Node)
    rows.replace_all_uses_with(output)
    tidy(step)


def _given(program: Program, entry: Entry, table: str, name: str) -> fx.Node:
    """An input in place of what is looked up in a table by its name."""
    lookups = entry.graph.find_nodes(op="call_function", target=aten.embedding.default)
    (looked,) = (n for n in lookups if str(n.args[0].target).endswith(table))
    found = looked.meta["val"]
    holder = Editor(program, entry.graph).placeholder(name, found.shape, found.dtype)
    looked.replace_all_uses_with(holder)
    return holder


def _trim(entry: Entry) -> None:
    """Leave out what the outputs do not need, inputs too."""
    tidy(entry)
    for holder in entry.graph.find_nodes(op="placeholder"):
        if not holder.users:
            entry.graph.erase_node(holder)
    entry.defaults = {}


def _part(program: Program, place: int, table: str | None, name: str) -> Entry:
    """One of the two as an entry; taps in place of what looks them up in `table`."""
    entry = program.copy().step
    value: Any = _mixed(entry).args[place]
    if table is not None:
        head = program.facts.draft_head
        if head is not None and head.embedding:  # it lies before the features
            value = value.args[0][-1]
        taps = _given(program, entry, table, TAPS)
        for node in entry.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            if node.args[0] is entry.input("tokens"):
                node.update_arg(0, taps)
    entry.set_outputs({name: value})
    _trim(entry)
    return entry
