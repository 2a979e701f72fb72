"""Qwen2 with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored

KINDS = ("gate", "up", "down")
EXPERTS = {f"ffn_{kind}_exps": f"mlp.experts.{{}}.{kind}_proj" for kind in KINDS}


@dataclass(frozen=True)
class Qwen2Moe(Base):
    """Every layer has experts, and one that all tokens share."""

    model_type = "qwen2_moe"
    modules = Modules(
        {
            **LAYER,
            **{f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in KINDS},
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        EXPERTS,
    )

    def config(self) -> dict[str, Any]:
        count, used = self.metadata.experts_used()
        return {
            **super().config(),
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": self.metadata.count("expert_feed_forward_length"),
            "shared_expert_intermediate_size": self.metadata.count(
                "expert_shared_feed_forward_length"
            ),
            "norm_topk_prob": False,
        }

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        if kind == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            tensor = replace(
                tensor, shape=(1, *tensor.shape)
            )  # a row, which the file has as a vector
        return super().weight(kind, name, tensor)
