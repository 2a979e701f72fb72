"""Granite 3 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf.granite import Granite

SHARED = {
    ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"): "shared_mlp.input_linear.weight",
    ("ffn_down_shexp.weight",): "shared_mlp.output_linear.weight",
}
EXPERTS = {
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "block_sparse_moe.input_linear.weight",
    ("ffn_down_exps.weight",): "block_sparse_moe.output_linear.weight",
}
ROUTER = {"ffn_gate_inp": "block_sparse_moe.router.layer"}


@dataclass(frozen=True)
class GraniteMoe(Granite):
    """Gate and up are one matrix in the model. There may be an expert that all tokens share."""

    model_type = "granitemoe"
    modules = Modules({**LAYER, **ROUTER}, joined={**EXPERTS, **SHARED})

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        count, used = metadata.experts_used()
        config = {**config, "num_local_experts": count, "num_experts_per_tok": used}
        if not metadata.has("expert_shared_feed_forward_length"):
            return config
        shared = metadata.count("expert_shared_feed_forward_length")
        return {**config, "model_type": "granitemoeshared", "shared_intermediate_size": shared}
