"""Gemma 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf.gemma import shifted
from accel.ir.weights import Stored

NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LARGEST = 46  # layers of the 27B model, which scales its scores otherwise


@dataclass(frozen=True)
class Gemma2(Base):
    """Every second layer attends to all tokens, the others to a window."""

    model_type = "gemma2"
    layer = {**Base.layer, **NORMS}

    def config(self) -> dict[str, Any]:
        config = super().config()
        sliding = self.flags("attention.sliding_window_pattern", 2)
        return {
            **config,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self.count("attention.sliding_window", 4096),
            "layer_types": kinds(sliding),
            "attn_logit_softcapping": self.positive("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self.positive("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": scalar(config, _LARGEST),
        }

    def weight(self, kind: str, last: str, name: str, tensor: GgufTensor) -> Stored:
        return shifted(kind, stored(name, tensor, self.file.pages))


def kinds(sliding: list[bool]) -> list[str]:
    """`layer_types`."""
    return [f"{'sliding' if slides else 'full'}_attention" for slides in sliding]


def scalar(config: dict[str, Any], largest: int) -> int:
    """`query_pre_attn_scalar`, which a file does not say: llama.cpp goes by the number of layers."""
    whole: int = config["hidden_size"] // config["num_attention_heads"]
    width: int = config["head_dim"]
    return whole if config["num_hidden_layers"] == largest else width
