"""`question` [B]: the position where the question begins; -1: nobody said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from accel.passes.kv.inputs import EntryInputs, Input, Site


class Question(Input):
    """`Session.mark` says where."""

    names = marks = ("question",)

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """See Input."""
        return {"question": entry.placeholder("question", entry.blank((entry.batch,), torch.int64))}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Input."""
        return {"question": operands["question"]}
