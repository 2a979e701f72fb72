"""`queries` [B,H,W,D] and `query_positions` [B,W]: the last queries, which the session collects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.entries.compress import queries_of
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import operands_of
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes.kv.inputs import EntryInputs, Input, Site

_OBSERVED = 11  # example size while shapes are worked out


class Queries(Input):
    """The step gives each layer's queries by token, `queries.<layer> [B,T,H,D]`; the entry takes the last W."""

    names = ("queries", "query_positions")
    relies = frozenset({Invariant.ALL_LAYERS_RUN})

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        editor = Editor(program, program.step.graph)
        outputs = program.step.output_nodes()
        for site in sites:
            queries = operands_of(site.node).q
            with editor.graph.inserting_before(editor.graph.find_nodes(op="output")[0]):
                turned = editor.call(torch.ops.aten.transpose.int, queries, 1, 2, like=site.node)
            outputs[queries_of(site.layer)] = turned
        program.step.set_outputs(outputs)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        if "query_positions" in entry.placeholders:
            window = entry.placeholders["query_positions"].meta["val"].shape[1]
        else:
            window = entry.source.symbol("W", _OBSERVED)
        shape = sizes(operands_of(site.node).q)
        queries = entry.blank((entry.batch, window, int(shape[1]), int(shape[3])), torch.float32)
        where = entry.blank((entry.batch, window), torch.int64)
        return {
            "queries": entry.placeholder(queries_of(site.layer), queries),
            "query_positions": entry.placeholder("query_positions", where),
        }

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        return {
            "queries": operands["queries"].transpose(1, 2),
            "query_positions": operands["query_positions"],
        }
