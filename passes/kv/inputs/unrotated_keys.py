"""`unrotated_keys` [B,G,S,D]: the cached keys as they are before their rotation by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.op import operand_of
from accel.ir.program import Editor
from accel.ir.state import Part
from accel.ir.trace import trace
from accel.passes.kv._shared.rotation import rotated, rotation_of
from accel.passes.kv.inputs import EntryInputs, Input, Site


class UnrotatedKeys(Input):
    """The entry rotates cached keys back by their positions, with the step's own tables: no state beside them."""

    names = ("unrotated_keys",)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input: the tables of the way back, [M,R/2] by position, if keys are rotated."""
        new = operand_of(operand_of(site.node, Part.KEYS), "new")
        rotation = rotation_of(entry.program, new, "keys")
        if rotation is None:
            return {}
        editor, factor = Editor(entry.program, entry.graph), rotation.factor**2

        def inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            return cos / factor, -sin / factor

        tables = trace(
            editor, f"back.{site.layer}", inverse, *rotation.tables(editor), key=("back", factor)
        )
        return dict(zip(_names(rotation.interleaved), tables, strict=True))

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        keys = torch.cat((operands["kept_k"], operands["recent_k"]), dim=2)
        recent = operands["recent_pos"][:, None].expand(-1, keys.shape[1], -1)
        where = torch.cat((operands["kept_pos"], recent), dim=2)
        for interleaved in (False, True):
            if (names := _names(interleaved))[0] in operands:
                cos, sin = (operands[name] for name in names)
                places = where.clamp(min=0)
                keys = rotated(keys, cos[places], sin[places], interleaved)
        return {"unrotated_keys": keys}


def _names(interleaved: bool) -> tuple[str, str]:
    """Of the tables among a layer's operands."""
    way = "pairs" if interleaved else "halves"
    return f"back_{way}_cos", f"back_{way}_sin"
