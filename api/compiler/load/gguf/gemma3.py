"""The text part of Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf.gemma import shifted
from accel.compiler.load.gguf.gemma2 import NORMS, kinds, scalar
from accel.ir.weights import Stored

_LARGEST = 62  # layers of the 27B model, which scales its scores otherwise


@dataclass(frozen=True)
class Gemma3(Base):
    """Every sixth layer attends to all tokens, the others to a window, with a rotation of their own."""

    model_type = "gemma3_text"
    layer = {
        **Base.layer,
        **NORMS,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }

    def config(self) -> dict[str, Any]:
        config = super().config()
        told = self.number("attention.sliding_window", 0) > 0
        window = self.count("attention.sliding_window") if told else 0
        sliding = self.flags("attention.sliding_window_pattern", 6)
        local = {"rope_type": "default", "rope_theta": self.positive("rope.freq_base_swa", 10000.0)}
        capped = self._has("final_logit_softcapping")
        return {
            **config,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": window or config["max_position_embeddings"],
            "layer_types": kinds([slides and window > 0 for slides in sliding]),
            "rope_parameters": {
                "full_attention": config["rope_parameters"],
                "sliding_attention": local,
            },
            "attn_logit_softcapping": None,
            "final_logit_softcapping": self.positive("final_logit_softcapping") if capped else None,
            "query_pre_attn_scalar": scalar(config, _LARGEST),
        }

    def weight(self, kind: str, last: str, name: str, tensor: GgufTensor) -> Stored:
        return shifted(kind, stored(name, tensor, self.file.pages))
