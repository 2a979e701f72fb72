"""Command R and R+."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS


@dataclass(frozen=True)
class CommandR(Base):
    """Attention and MLP read the same norm; the logits have a factor."""

    model_type = "cohere"
    modules = Modules({**LAYER, **HEAD_NORMS})

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "logit_scale": self.metadata.positive("logit_scale"),
            "use_qk_norm": self.metadata.holds("attn_q_norm.weight"),
            "attention_bias": self.metadata.holds("attn_output.bias"),
        }
