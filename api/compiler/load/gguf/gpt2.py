"""GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf import Base, Modules
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Gpt2(Base):
    """The model has the matrices of its layers transposed."""

    model_type = "gpt2"
    modules = Modules(
        {
            "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        },
        top={
            "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
    )  # fmt: skip

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
        if hidden % heads:
            raise metadata.wrong(f"attention.head_count is {heads} for embedding_length {hidden}")
        return {
            "model_type": self.model_type,
            "vocab_size": metadata.vocabulary(),
            "n_embd": hidden,
            "n_inner": metadata.count("feed_forward_length", 4 * hidden),
            "n_layer": metadata.depth(),
            "n_head": heads,
            "n_positions": metadata.count("context_length"),
            "layer_norm_epsilon": metadata.positive("attention.layer_norm_epsilon"),
            **metadata.shared(),
        }

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        found = super().weight(kind, name, tensor)
        turned = len(tensor.shape) == 2 and kind in self.modules.layer
        return found.changed(_transposed) if turned else found


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()
