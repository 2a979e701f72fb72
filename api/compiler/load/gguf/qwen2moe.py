"""Qwen2 with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._metadata import Metadata
from accel.ir.weights import Stored

KINDS = ("gate", "up", "down")
EXPERTS = {f"ffn_{kind}_exps": f"mlp.experts.{{}}.{kind}_proj" for kind in KINDS}
SHARED = {
    **{f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in KINDS},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


@dataclass(frozen=True)
class Qwen2Moe(Base):
    """Every layer has experts, and one that all tokens share."""

    model_type = "qwen2_moe"
    modules = Modules({**LAYER, **SHARED}, EXPERTS)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            **experts(self.metadata),
            **shared(self.metadata),
            "norm_topk_prob": False,
        }

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        return super().weight(kind, name, row(kind, tensor))


def experts(metadata: Metadata) -> dict[str, Any]:
    """The part of a configuration that says what experts there are."""
    count, used = metadata.experts_used()
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
    }


def shared(metadata: Metadata) -> dict[str, Any]:
    """The same of the expert that all tokens share."""
    return {"shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length")}


def row(kind: str, tensor: GgufTensor) -> GgufTensor:
    """A tensor as it is; the gate of the shared expert, which a file has as a vector, as a row."""
    if kind == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor
