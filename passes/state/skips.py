"""An entry that finds which layers to leave out, by a dynamic programme over the layers (CLaSp, arXiv:2505.24196)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from accel.ir.entries.skips import LIKENESS, SKIPPING, SKIPS, STREAMS
from accel.ir.errors import PassError
from accel.ir.invariants import Method
from accel.ir.program import Editor, Program
from accel.ir.region import layer_calls
from accel.ir.state import writes_state
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.state.embedded import tidy
from accel.passes.state.layers import Layers
from accel.passes.state.trees import Trees
from accel.passes.stream import stream_after

aten = torch.ops.aten
NEVER = -2.0  # below any cosine


@dataclass(frozen=True)
class Skips(Pass):
    """A new entry

    `skips(streams [B,L+1,E], positions [B,T], slots [B], tree [B,T,T]) -> skips [B,L,T], likeness [B,T], state`

    of a token's stream before each layer and behind the last. Row j of the T is what the model makes of it with j
    layers less. All lie at the token's position, and of the call each sees itself alone. Behind each layer row j is
    either what the layer makes of it, or row j-1 as it came in (1 in `skips`), whichever is nearer to the token's own
    stream there, by the cosine. `likeness`: the cosines in the end. The state that it gives is of no use.

    reader: the method that asks.
    """

    reader: Method

    after = (Layers, Trees)
    must_change = True
    stage = -1  # before layers are left out

    def run(self, program: Program) -> Report:
        entry = program.copy().step
        calls = layer_calls(entry.graph)
        if len(calls) != len(program.facts.layers) or not calls:
            raise PassError(
                f"{self.reader.full_name} runs layers apart, but {len(calls)} of {len(program.facts.layers)} layers "
                "were found in the graph; build without it"
            )
        editor, positions = Editor(program, entry.graph), entry.input("positions")
        before = calls[0].args[0]
        assert isinstance(before, fx.Node)
        batch, _, width = before.meta["val"].shape
        shape = batch, len(calls) + 1, width
        streams = editor.placeholder(STREAMS, shape, before.meta["val"].dtype)
        with entry.graph.inserting_before(calls[0]):
            begun = trace(editor, SKIPS, _begun, streams, positions, key="begun")
        calls[0].update_arg(0, begun)
        before, chosen = begun, list[fx.Node]()
        for number, call in enumerate(calls, 1):
            after = stream_after(call)
            readers, rule = list(after.users), partial(_nearer, number=number)
            with entry.graph.inserting_before(after.next):
                found, skips = trace(editor, SKIPS, rule, after, before, streams)
            for node in readers:
                node.replace_input_with(after, found)
            chosen.append(skips)
            before = found
        with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
            every = trace(editor, SKIPS, lambda *each: torch.stack(each, 1), *chosen)
            likeness = trace(editor, SKIPS, _in_the_end, before, streams)
        state = {n: v for n, v in entry.output_nodes().items() if writes_state(n)}
        entry.set_outputs({SKIPS: every, LIKENESS: likeness, **state})
        for node in entry.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            if node.args[0] is entry.input("tokens"):
                node.update_arg(0, positions)
        tidy(entry)
        for holder in entry.graph.find_nodes(op="placeholder"):
            if not holder.users:
                entry.graph.erase_node(holder)
        if "tokens" in entry.inputs:
            raise PassError(
                f"{self.reader.full_name}: this model's layers read its tokens beside the stream, which a stream "
                "cannot stand for; build without it"
            )
        entry.defaults = {}
        program.entries[SKIPPING.name] = entry
        return Report(changed=len(calls))


def _begun(streams: Tensor, positions: Tensor) -> Tensor:
    """The stream before the first layer, for each row [B,T,E]."""
    return streams[:, :1].expand(-1, positions.shape[1], -1).contiguous()


def _nearer(after: Tensor, before: Tensor, streams: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Of rows [B,T,E] before and behind layer `number` (from 1), what the next layer reads; and whether that is row j-1
    as it was, 1 or 0 [B,T].
    """
    left = torch.cat([before[:, :1], before[:, :-1]], 1)
    want = streams[:, number : number + 1]
    rows = torch.arange(after.shape[1])
    ran = _cosine(after, want).masked_fill(rows >= number, NEVER)
    skipped = _cosine(left, want).masked_fill((rows < 1) | (rows > number), NEVER)
    skips = skipped > ran
    return torch.where(skips[..., None], left, after), skips.float()


def _in_the_end(rows: Tensor, streams: Tensor) -> Tensor:
    return _cosine(rows, streams[:, -1:])


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.float(), b.float()
    sizes = a.square().sum(-1) * b.square().sum(-1)
    return (a * b).sum(-1) / sizes.clamp(min=1e-12).sqrt()
