"""LFM2 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Modules
from accel.compiler.load.gguf.lfm2 import ENDS, OPERATORS, Lfm2


@dataclass(frozen=True)
class Lfm2Moe(Lfm2):
    """All layers but the first ones have experts, which a sigmoid weighs."""

    model_type = "lfm2_moe"
    modules = Modules(
        {
            **OPERATORS,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        {
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
        },
        top=ENDS,
    )

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        count, used = metadata.experts_used()
        return {
            **config,
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
            "num_dense_layers": int(metadata.number("leading_dense_block_count", 0)),
            "use_expert_bias": metadata.holds("exp_probs_b.bias"),
            "norm_topk_prob": True,
        }
