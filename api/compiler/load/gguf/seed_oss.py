"""Seed-OSS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules


@dataclass(frozen=True)
class SeedOss(Base):
    """Queries, keys and values have biases."""

    model_type = "seed_oss"
    modules = Modules({**LAYER, "post_attention_norm": "post_attention_layernorm"})

    def config(self) -> dict[str, Any]:
        holds = self.metadata.holds
        biases = {
            "attention_bias": holds("attn_q.bias"),
            "attention_out_bias": holds("attn_output.bias"),
        }
        return {**super().config(), **biases, "mlp_bias": False}
