"""Granite 3 and 4 without experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf._paired import Paired


@dataclass(frozen=True)
class Granite(Paired):
    """Embeddings, residuals, scores and logits have factors."""

    model_type = "granite"

    def config(self) -> dict[str, Any]:
        biased = self.metadata.holds("attn_output.bias")
        return {**super().config(), **self.factors(), "attention_bias": biased, "mlp_bias": False}

    def factors(self) -> dict[str, float]:
        """Where a file has none, what llama.cpp takes."""
        metadata = self.metadata
        return {
            "embedding_multiplier": metadata.positive("embedding_scale", 1.0),
            "residual_multiplier": metadata.positive("residual_scale", 1.0),
            "logits_scaling": metadata.positive("logit_scale", 1.0),
            "attention_multiplier": metadata.positive("attention.scale", metadata.width() ** -0.5),
        }
