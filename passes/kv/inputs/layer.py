"""`layer` []: the number of the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.passes.kv.inputs import EntryInputs, Input, Site


class Layer(Input):
    """A parameter, so that layers share what is traced."""

    names = ("layer",)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        number = torch.tensor(site.layer)
        return {"layer": entry.param(f"compress.{site.layer}.layer", number)}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        return {"layer": operands["layer"]}
