"""Names the hidden state after a layer, and adds an entry that reads one by the model's own norm and head."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.entries.step import LOGITS
from accel.ir.program import Program
from accel.ir.region import layer_calls
from accel.passes import Pass, Report
from accel.passes.prefill._entry import copied, finished, result


@dataclass(frozen=True)
class AddHead(Pass):
    layer: int

    def run(self, program: Program) -> Report:
        entry, _ = copied(program, len(program.facts.layers), 0)
        logits = entry.output_nodes()[LOGITS]
        program.entries["head"] = finished(entry, [], {LOGITS: logits})
        step = program.step
        hidden = result(layer_calls(step.graph)[self.layer], 0)
        step.set_outputs({**step.output_nodes(), f"hidden.{self.layer}": hidden})
        return Report(changed=2)
