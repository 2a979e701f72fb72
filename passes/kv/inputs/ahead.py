"""`ahead` [B,G,S]: the position of a slot's token that the session ran behind what rows hold; -1: no such token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accel.passes.kv.inputs import Input


class Ahead(Input):
    """Queries of tokens behind `seen` attend to one another, too. Slots of positions behind theirs are stale."""

    names = ("ahead",)

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        groups = operands["kept_k"].shape[1]
        recent = operands["recent_pos"][:, None].expand(-1, groups, -1)
        where = torch.cat((operands["kept_pos"], recent), dim=2)
        return {"ahead": where.masked_fill(where < operands["seen"][:, None, None], -1)}
