"""Qwen3 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.qwen2moe import EXPERTS
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class Qwen3Moe(Base):
    """Every layer has experts."""

    model_type = "qwen3_moe"
    modules = Modules({**LAYER, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, EXPERTS)

    def config(self) -> dict[str, Any]:
        count, used = self.metadata.experts_used()
        return {
            **super().config(),
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": self.metadata.count("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
