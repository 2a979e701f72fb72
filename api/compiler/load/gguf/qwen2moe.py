"""Qwen2 with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from accel.compiler.load.gguf import Base
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored

_KINDS = ("gate", "up", "down")


@dataclass(frozen=True)
class Qwen2Moe(Base):
    """Every layer has experts, and one that all tokens share."""

    model_type = "qwen2_moe"
    layer = {
        **Base.layer,
        **{f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in _KINDS},
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    }
    experts = {f"ffn_{kind}_exps": f"mlp.experts.{{}}.{kind}_proj" for kind in _KINDS}

    def config(self) -> dict[str, Any]:
        count, used = self.experts_used()
        return {
            **super().config(),
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": self.count("expert_feed_forward_length"),
            "shared_expert_intermediate_size": self.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,
        }

    def weight(self, kind: str, last: str, name: str, tensor: GgufTensor) -> Stored:
        if kind == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            tensor = replace(
                tensor, shape=(1, *tensor.shape)
            )  # a row, which the file has as a vector
        return stored(name, tensor, self.file.pages)
