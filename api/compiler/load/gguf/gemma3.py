"""The text part of Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf.gemma import Gemma
from accel.compiler.load.gguf.gemma2 import NORMS, kinds, scalar
from accel.compiler.load.gguf.qwen3 import HEAD_NORMS

_LARGEST = 62  # layers of the 27B model, which scales its scores otherwise


@dataclass(frozen=True)
class Gemma3(Gemma):
    """Every sixth layer attends to all tokens, the others to a window, with a rotation of their own."""

    model_type = "gemma3_text"
    modules = Modules({**LAYER, **NORMS, **HEAD_NORMS})

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        told = metadata.number("attention.sliding_window", 0) > 0
        window = metadata.count("attention.sliding_window") if told else 0
        sliding = metadata.flags("attention.sliding_window_pattern", 6)
        local = {
            "rope_type": "default",
            "rope_theta": metadata.positive("rope.freq_base_swa", 10000.0),
        }
        capped = metadata.has("final_logit_softcapping")
        return {
            **config,
            "sliding_window": window or config["max_position_embeddings"],
            "layer_types": kinds([slides and window > 0 for slides in sliding]),
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": local,
            },
            "attn_logit_softcapping": None,
            "final_logit_softcapping": metadata.positive("final_logit_softcapping")
            if capped
            else None,
            "query_pre_attn_scalar": scalar(config, _LARGEST),
        }
