"""The joint of methods by which all tokens of a prompt but the last only fill the cache: the entry `fill`."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from accel.ir.entries.fill import FILL
from accel.ir.prefill import Fill, Prefill
from accel.ir.program import Program
from accel.ir.region import Entry, Region
from accel.ir.state import writes_state
from accel.passes.clean.clean import remove_dead
from accel.passes.prefill._entry import finished


def layers_with_state(program: Program) -> list[int]:
    """The layers that write state, in order."""
    return sorted({s.layer for s in program.state if s.layer is not None and not s.cross})


def filling(program: Program, entry: Entry, least: int, whole: bool = False) -> None:
    """Let sessions fill the cache by what the state that `entry`, a changed copy of the step, writes depends on.
    `whole`: see `Fill`.
    """
    entry.set_outputs({n: v for n, v in entry.output_nodes().items() if writes_state(n)})
    remove_dead(entry.graph)
    calls: list[fx.Node] = [n for n in entry.graph.nodes if isinstance(n.target, Region)]
    program.entries[FILL.name] = finished(entry, calls, entry.output_nodes())
    program.facts.prefill = replace(program.facts.prefill or Prefill(), fill=Fill(least, whole))
