"""`prompt` [B]: how many tokens of each row are the prompt's; all of them while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.passes.kv.inputs import EntryInputs, Input, Site


class Prompt(Input):
    """The length of the row at the end of its last prompt: generated tokens begin there."""

    names = marks = ("prompt",)
    lasting = True

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        return {"prompt": entry.placeholder("prompt", entry.blank((entry.batch,), torch.int64))}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        return {"prompt": operands["prompt"]}
