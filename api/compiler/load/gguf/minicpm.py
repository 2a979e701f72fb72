"""MiniCPM, which computes what Granite does."""

from __future__ import annotations

from dataclasses import dataclass

from accel.compiler.load.gguf.granite import Granite


@dataclass(frozen=True)
class MiniCpm(Granite):
    """Older files have no factors: they are those of the 2B model."""

    def factors(self) -> dict[str, float]:
        metadata = self.metadata
        usual = {
            "embedding_scale": 12.0,
            "residual_scale": 1.4 / metadata.depth() ** 0.5,
            "logit_scale": metadata.count("embedding_length") / 256,
        }
        embedding, residual, logits = (metadata.positive(key, usual[key]) for key in usual)
        return {
            "embedding_multiplier": embedding,
            "residual_multiplier": residual,
            "logits_scaling": logits,
            "attention_multiplier": metadata.width() ** -0.5,
        }
