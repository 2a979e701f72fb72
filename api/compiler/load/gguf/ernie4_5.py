"""ERNIE 4.5 without experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base


@dataclass(frozen=True)
class Ernie45(Base):
    """The rotary pairs are neighbours, in the model too."""

    model_type = "ernie4_5"

    def config(self) -> dict[str, Any]:
        return {**super().config(), "use_bias": self.metadata.holds("attn_output.bias")}
