"""GLM-4-0414 and GLM-Z1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules


@dataclass(frozen=True)
class Glm4(Base):
    """Half of a head is rotated, in pairs of neighbours. Gate and up are one matrix."""

    model_type = "glm4"
    modules = Modules(
        {
            **{k: v for k, v in LAYER.items() if k != "ffn_gate"},
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    )

    def config(self) -> dict[str, Any]:
        config = self.metadata.decoder(self.model_type, partial=True)
        return {**config, "attention_bias": self.metadata.holds("attn_q.bias")}
