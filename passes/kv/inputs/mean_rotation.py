"""`mean_rotation` [B,D,D]: the mean of the rotations of queries by the positions to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import operands_of
from accel.ir.program import Editor
from accel.ir.region import sizes
from accel.ir.trace import trace
from accel.passes.kv._shared.rotation import rotation_of, to_come
from accel.passes.kv.inputs import EntryInputs, Input, Site, parameters


class MeanRotation(Input):
    """Over the next `future` positions after `seen`, of the step's own tables: x @ it is a row x turned so. The
    identity where the model does not rotate queries.
    """

    names = ("mean_rotation",)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        using = {m.future for m in methods if callable(m) and self.names[0] in parameters(m)}
        if len(using) > 1:
            raise PassError("two methods read the mean rotation over other numbers of positions")
        (count,) = using
        editor, queries = Editor(entry.program, entry.graph), operands_of(site.node).q
        rotation, width = rotation_of(entry.program, queries, "queries"), int(sizes(queries)[3])
        tables = [] if rotation is None else rotation.to_come(editor, site.layer, count)
        interleaved = rotation is not None and rotation.interleaved

        def matrix(seen: Tensor, *tables: Tensor) -> Tensor:
            return mean_rotation(seen, tables, interleaved, width)

        name, key = (
            f"mean_rotation.{site.layer}",
            ("mean rotation", interleaved, width, len(tables)),
        )
        found = trace(editor, name, matrix, entry.placeholders["seen"], *tables, key=key)
        return {"mean_rotation": found}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        return {name: operands[name] for name in self.names if name in operands}


def mean_rotation(seen: Tensor, tables: Sequence[Tensor], interleaved: bool, width: int) -> Tensor:
    """[B,D,D] after `seen` [B] tokens; tables: see `to_come`."""
    whole = torch.eye(width, device=seen.device).expand(seen.shape[0], 1, width, width)
    return to_come(whole, seen, tables, interleaved)[:, 0].clone()
