"""Hunyuan without experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules


@dataclass(frozen=True)
class HunyuanDense(Base):
    """Queries and keys are normalised behind their rotation."""

    model_type = "hunyuan_v1_dense"
    modules = Modules(
        {
            **LAYER,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        }
    )

    def config(self) -> dict[str, Any]:
        return {**super().config(), "attention_bias": self.metadata.holds("attn_q.bias")}
