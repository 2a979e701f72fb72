"""An entry that gives the output head's token of the residual stream behind any layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accel.ir.entries.exit import CHANCE, EXIT, STREAM, TOKEN
from accel.ir.errors import PassError
from accel.ir.invariants import Method
from accel.ir.program import Editor, Program
from accel.ir.region import layer_calls
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.state.embedded import tidy
from accel.passes.state.head import Head
from accel.passes.state.layers import Layers
from accel.passes.stream import stream_after


@dataclass(frozen=True)
class Exits(Pass):
    """A new entry

    `exit(stream [B,T,E], rows [B,N]) -> token [B,N], chance [B,N]`: the likeliest token by the last norm and the output
    head of rows of a stream, as the step gives it behind a layer (`Taps`), and its probability. A step computes nothing
    of it.

    reader: the method that asks.
    """

    reader: Method

    after = (Head, Layers)
    must_change = True
    stage = -1  # before layers are left out

    def run(self, program: Program) -> Report:
        entry = program.copy().step
        calls = layer_calls(entry.graph)
        if not calls:
            raise PassError(
                f"{self.reader.full_name} reads what goes from layer to layer, but no layers were found in the graph; "
                "build without it"
            )
        last = stream_after(calls[-1])
        value, logits = last.meta["val"], entry.output_nodes()["logits"]
        editor = Editor(program, entry.graph)
        last.replace_all_uses_with(editor.placeholder(STREAM, value.shape, value.dtype))
        with entry.graph.inserting_before(entry.graph.find_nodes(op="output")[0]):
            token, chance = trace(editor, EXIT.name, _likeliest, logits)
        entry.set_outputs({TOKEN: token, CHANCE: chance})
        tidy(entry)
        for holder in entry.graph.find_nodes(op="placeholder"):
            if not holder.users:
                entry.graph.erase_node(holder)
        program.entries[EXIT.name] = entry
        return Report(changed=1)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row [B,N,V], and its probability [B,N]."""
    return logits.argmax(-1), logits.float().softmax(-1).amax(-1)
