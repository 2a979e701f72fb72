"""Qwen3 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.qwen2moe import EXPERTS, experts
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class Qwen3Moe(Base):
    """Every layer has experts."""

    model_type = "qwen3_moe"
    modules = Modules({**LAYER, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, EXPERTS)

    def config(self) -> dict[str, Any]:
        return {**super().config(), **experts(self.metadata), "norm_topk_prob": True}
