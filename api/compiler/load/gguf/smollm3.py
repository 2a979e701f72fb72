"""SmolLM3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf._paired import Paired


@dataclass(frozen=True)
class SmolLM3(Paired):
    """Every fourth layer has no rotation, in llama.cpp too: a file does not say it."""

    model_type = "smollm3"

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "no_rope_layer_interval": 4,
            "attention_bias": self.metadata.holds("attn_q.bias"),
            "mlp_bias": False,
            "use_sliding_window": False,
        }
