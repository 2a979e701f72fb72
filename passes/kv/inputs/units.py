"""`units` [B,G,S]: the number of the unit that each slot's token belongs to, such as a sentence; -1: none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.passes.kv.inputs import EntryInputs, Input, Site

_MARKED = 37  # example size while shapes are worked out


class Units(Input):
    """The entry takes them by position, `units` [B,U], as `Session.mark` says them."""

    names = marks = ("units",)
    lasting = True

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        if "units" in entry.placeholders:
            return {"units": entry.placeholders["units"]}
        size = entry.source.symbol("U", _MARKED)
        table = entry.blank((entry.batch, size), torch.int64)
        return {"units": entry.placeholder("units", table)}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        units, kept = operands["units"], operands["kept_pos"]
        recent = operands["recent_pos"][:, None].expand(-1, kept.shape[1], -1)
        where = torch.cat((kept, recent), dim=2)  # [B,G,S]
        last = torch.ones_like(units).sum(1)[:, None, None] - 1
        at = torch.minimum(where.clamp(min=0), last)
        found = units[:, None].expand(-1, kept.shape[1], -1).gather(2, at)
        return {"units": found.masked_fill(where < 0, -1)}
