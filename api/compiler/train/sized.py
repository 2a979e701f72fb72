"""What trainers share whose heads have the sizes of the model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from accel.compiler.train.heads import Beside


@dataclass
class BesideSized(Beside):
    """A model whose configuration says how wide its parts are."""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Of its language model."""
        config = self.program.facts.config
        return config.get("text_config") or config

    @cached_property
    def stream_width(self) -> int:
        """Of the model's embedding."""
        return int(self.embedded(torch.zeros(1, 1, dtype=torch.int64)).shape[2])

    @property
    def inner_width(self) -> int:
        """Of the model's MLPs."""
        return int(self.text_config.get("intermediate_size") or 2 * self.stream_width)
