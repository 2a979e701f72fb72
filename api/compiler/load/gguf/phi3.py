"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base, Modules
from accel.compiler.load.gguf._metadata import LONG, SHORT


@dataclass(frozen=True)
class Phi3(Base):
    """Queries, keys and values are one matrix, and so are gate and up. Like llama.cpp, it has no window."""

    model_type = "phi3"
    modules = Modules({
        "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
    })  # fmt: skip
    read_apart = (LONG, SHORT)

    def config(self) -> dict[str, Any]:
        return {
            **self.metadata.decoder(self.model_type, self.metadata.longrope(), partial=True),
            "sliding_window": None,
            "original_max_position_embeddings": self.metadata.original_context(),
        }
