"""Llama and Mistral; Mixtral where there are experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf._paired import Paired


@dataclass(frozen=True)
class Llama(Paired):
    """Experts are those of Mixtral."""

    model_type = "llama"
    modules = Modules(
        {**LAYER, "ffn_gate_inp": "mlp.gate"},
        {
            "ffn_gate_exps": "mlp.experts.{}.w1",
            "ffn_down_exps": "mlp.experts.{}.w2",
            "ffn_up_exps": "mlp.experts.{}.w3",
        },
    )

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        if metadata.has("expert_count") and metadata.count("expert_count") > 1:
            count, used = metadata.experts_used()
            return {
                **config,
                "model_type": "mixtral",
                "num_local_experts": count,
                "num_experts_per_tok": used,
            }
        biased = metadata.holds("attn_output.bias")
        return {**config, "attention_bias": biased, "mlp_bias": False}
