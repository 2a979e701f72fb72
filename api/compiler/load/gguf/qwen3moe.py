"""Qwen3 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base


@dataclass(frozen=True)
class Qwen3Moe(Base):
    """Every layer has experts."""

    model_type = "qwen3_moe"
    layer = {
        **Base.layer,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate_inp": "mlp.gate",
    }
    experts = {
        f"ffn_{kind}_exps": f"mlp.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")
    }

    def config(self) -> dict[str, Any]:
        count, used = self.experts_used()
        return {
            **super().config(),
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": self.count("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
