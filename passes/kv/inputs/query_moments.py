"""`query_mean` [B,H,D] and `query_covariance` [B,H,D,D]: of the queries so far, rotated to the positions to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import operands_of
from accel.ir.program import Editor, Program, State
from accel.ir.state import Part, name_of
from accel.ir.trace import trace
from accel.passes.kv._shared.rotation import rotation_of, to_come
from accel.passes.kv.inputs import EntryInputs, Input, Site, parameters
from accel.passes.state.recurrent import buffer

_QUERY = "query"  # detail of the state value


class QueryMoments(Input):
    """State of fixed size, `mass.<layer>.query.recent` [B,H,N,D], which each call updates by its queries before their
    rotation. Rows: their mean; their number; and, where a method names `query_covariance`, the D x D sum of the outer
    products of what differs from the mean. One value, since a graph may write state in place before it reads another.
    Padding and the first `sinks` tokens are left out.

    The entry rotates both by the mean rotation over the next `future` positions after `seen`, out of the step's tables.
    """

    names = ("query_mean", "query_covariance")
    relies = frozenset({Invariant.ALL_LAYERS_RUN})
    breaks = frozenset({Invariant.REWIND})  # what a draft's queries added cannot be taken back

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        method, squares = _wanted(methods)
        editor, outputs = Editor(program, program.step.graph), program.step.output_nodes()
        end = editor.graph.find_nodes(op="output")[0]
        letters = {"B": program.step.input("tokens").meta["val"].shape[0]}
        for site in sites:
            x = operands_of(site.node)
            rotation = rotation_of(program, x.q, "queries")
            queries = x.q if rotation is None else rotation.source
            _, heads, _, width = queries.meta["val"].shape
            heads, width = int(heads), int(width)
            shape = ("B", heads, width + 2 if squares else 2, width)
            state = State(Part.MASS, site.layer, "float32", shape, detail=_QUERY)
            before = buffer(program, editor, state, letters)

            def step(queries: Tensor, positions: Tensor, old: Tensor) -> Tensor:
                return moments(queries, positions >= method.sinks, old)

            with editor.graph.inserting_before(end):
                outputs[state.output] = trace(
                    editor,
                    state.name,
                    step,
                    *(queries, x.q_pos, before),
                    like=site.node,
                    key=("query moments", method.sinks),
                )
        program.step.set_outputs(outputs)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        method, squares = _wanted(methods)
        name = name_of(Part.MASS, site.layer, detail=_QUERY)
        state = entry.placeholder(name, entry.program.step.input(name).meta["val"])
        editor = Editor(entry.program, entry.graph)
        rotation = rotation_of(entry.program, operands_of(site.node).q, "queries")
        tables: list[fx.Node] = []
        interleaved = False
        if rotation is not None:
            interleaved = rotation.interleaved
            tables = rotation.to_come(editor, site.layer, method.future)

        def turned(seen: Tensor, state: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
            return future(state, seen, tables, interleaved)

        found = trace(
            editor,
            f"to_come.{site.layer}",
            turned,
            *(entry.placeholders["seen"], state, *tables),
            key=("queries to come", interleaved, len(tables)),
        )
        return dict(zip(self.names if squares else self.names[:1], found, strict=True))

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        return {name: operands[name] for name in self.names if name in operands}


def _wanted(methods: Sequence[Any]) -> tuple[Any, bool]:
    """The method that names one of both, and whether one names the covariance."""
    named = [(m, parameters(m)) for m in methods if callable(m)]
    using = [m for m, names in named if set(names) & set(QueryMoments.names)]
    if len({(m.sinks, m.future) for m in using}) > 1:
        raise PassError("two methods read moments of queries with other `sinks` or `future`")
    return using[0], any("query_covariance" in names for _, names in named)


def moments(queries: Tensor, real: Tensor, state: Tensor) -> Tensor:
    """The state [B,H,N,D] with the real ones [B,T] of queries [B,H,T,D]."""
    mean, count = state[:, :, :1], state[:, :, 1:2]
    here = real[:, None, :, None]
    x = queries.float().masked_fill(~here, 0)
    new = real.sum(1).float()[:, None, None, None]
    own = x.sum(2, keepdim=True) / new.clamp(min=1)
    step, share = own - mean, new / (count + new).clamp(min=1)
    parts = [mean + step * share, count + new]
    if state.shape[2] > 2:
        centred = (x - own).masked_fill(~here, 0)
        between = step.transpose(2, 3) @ (step * share * count)
        parts.append(state[:, :, 2:] + centred.transpose(2, 3) @ centred + between)
    return torch.cat(parts, dim=2)


def future(
    state: Tensor, seen: Tensor, tables: Sequence[Tensor], interleaved: bool
) -> tuple[Tensor, ...]:
    """Mean [B,H,D] and covariance [B,H,D,D] (if the state has it) under the mean rotation after `seen` [B] tokens, of
    which `tables` are (see `to_come`).
    """

    def turned(x: Tensor) -> Tensor:
        return to_come(x, seen, tables, interleaved)

    mean = turned(state[:, :, :1])[:, :, 0]
    if state.shape[2] == 2:
        return (mean,)
    covariance = state[:, :, 2:] / state[:, :, 1:2].clamp(min=1)
    return mean, turned(turned(covariance).transpose(2, 3)).transpose(2, 3)
