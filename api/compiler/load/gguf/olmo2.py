"""OLMo 2 and 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.gemma2 import kinds
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class Olmo2(Base):
    """Norms come behind attention and MLP. OLMo 3 has windows, in all but every fourth layer."""

    model_type = "olmo2"
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
        config["attention_bias"] = metadata.holds("attn_output.bias")
        if not metadata.has("attention.sliding_window"):
            return config
        return {
            **config,
            "model_type": "olmo3",
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": kinds(metadata.flags("attention.sliding_window_pattern", 4)),
        }
