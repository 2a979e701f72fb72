"""EXAONE 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.gemma2 import kinds
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class Exaone4(Base):
    """Norms come behind attention and MLP. Where there are windows, only their layers are rotated."""

    model_type = "exaone4"
    modules = Modules(
        {
            **LAYER,
            **HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    )

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        if not metadata.has("attention.sliding_window"):
            whole = ["full_attention"] * config["num_hidden_layers"]
            return {**config, "sliding_window": None, "layer_types": whole}
        return {
            **config,
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": kinds(metadata.flags("attention.sliding_window_pattern", 4)),
        }
