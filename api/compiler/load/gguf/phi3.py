"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base, Modules

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True)
class Phi3(Base):
    """Queries, keys and values are one matrix, and so are gate and up. Like llama.cpp, it has no window."""

    model_type = "phi3"
    modules = Modules({
        "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
    })  # fmt: skip
    read_apart = (_LONG, _SHORT)

    def config(self) -> dict[str, Any]:
        return {
            **self.metadata.decoder(self.model_type, self._rope(), partial=True),
            "sliding_window": None,
            "original_max_position_embeddings": self._original(),
        }

    def _rope(self) -> dict[str, Any] | None:
        """`rope_parameters` with the factors of the file; None where it lacks them."""
        if not {_LONG, _SHORT} <= self.metadata.file.tensors.keys():
            return None
        factors = {
            f"{kind}_factor": self.metadata.factors(name).tolist()
            for kind, name in (("long", _LONG), ("short", _SHORT))
        }
        return {
            "rope_type": "longrope",
            "rope_theta": self.metadata.positive("rope.freq_base", 10000.0),
            "attention_factor": self.metadata.positive("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": self._original(),
            **factors,
        }

    def _original(self) -> int:
        """Tokens from which on the long factors hold."""
        whole = self.metadata.count("context_length")
        return self.metadata.count("rope.scaling.original_context_length", whole)
