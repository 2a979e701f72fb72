"""Gemma 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf.gemma import Gemma

NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LARGEST = 46  # layers of the 27B model, which scales its scores otherwise


@dataclass(frozen=True)
class Gemma2(Gemma):
    """Every second layer attends to all tokens, the others to a window."""

    model_type = "gemma2"
    modules = Modules({**LAYER, **NORMS})

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        sliding = metadata.flags("attention.sliding_window_pattern", 2)
        return {
            **config,
            "sliding_window": metadata.count("attention.sliding_window", 4096),
            "layer_types": kinds(sliding),
            "attn_logit_softcapping": metadata.positive("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": metadata.positive("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": scalar(config, _LARGEST),
        }


def kinds(sliding: list[bool]) -> list[str]:
    """`layer_types`."""
    return [f"{'sliding' if slides else 'full'}_attention" for slides in sliding]


def scalar(config: dict[str, Any], largest: int) -> int:
    """`query_pre_attn_scalar`, which a file does not say: llama.cpp goes by the number of layers."""
    whole: int = config["hidden_size"] // config["num_attention_heads"]
    width: int = config["head_dim"]
    return whole if config["num_hidden_layers"] == largest else width
