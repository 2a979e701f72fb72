"""GLM-4.5 and 4.6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.qwen2moe import EXPERTS, KINDS
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class Glm4Moe(Base):
    """All layers but the first ones have experts, which a sigmoid weighs. The last layer drafts."""

    model_type = "glm4_moe"
    modules = Modules(
        {
            **LAYER,
            **HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **{f"ffn_{kind}_shexp": f"mlp.shared_experts.{kind}_proj" for kind in KINDS},
        },
        EXPERTS,
    )

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        count, used = metadata.experts_used()
        groups = metadata.count("expert_group_count", 1)
        return {
            **metadata.decoder(self.model_type, partial=True),
            "attention_bias": metadata.holds("attn_q.bias"),
            "use_qk_norm": metadata.holds("attn_q_norm.weight"),
            "n_routed_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
            "n_shared_experts": metadata.count("expert_shared_count"),
            "first_k_dense_replace": int(metadata.number("leading_dense_block_count", 0)),
            "routed_scaling_factor": metadata.positive("expert_weights_scale", 1.0),
            "norm_topk_prob": metadata.flag("expert_weights_norm"),
            "n_group": groups,
            "topk_group": metadata.count("expert_group_used_count", groups),
        }
