"""OLMoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.qwen2moe import EXPERTS
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class Olmoe(Base):
    """Every layer has experts; queries and keys are normalised over all heads."""

    model_type = "olmoe"
    modules = Modules({**LAYER, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, EXPERTS)

    def config(self) -> dict[str, Any]:
        count, used = self.metadata.experts_used()
        config = {**super().config(), "num_experts": count, "num_experts_per_tok": used}
        return {**config, "norm_topk_prob": False}
