"""Command R7B and Command A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base
from accel.compiler.load.gguf.gemma2 import kinds


@dataclass(frozen=True)
class Cohere2(Base):
    """As Command R; layers with windows are rotated, and the others have no positions."""

    model_type = "cohere2"

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        return {
            **super().config(),
            "logit_scale": metadata.positive("logit_scale"),
            "attention_bias": metadata.holds("attn_output.bias"),
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": kinds(metadata.flags("attention.sliding_window_pattern", 4)),
        }
