"""GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf import Base
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Gpt2(Base):
    """The model has the matrices of its layers transposed."""

    model_type = "gpt2"
    layers = "transformer.h"
    top = {
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }  # fmt: skip
    layer = {
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
    }  # fmt: skip

    def config(self) -> dict[str, Any]:
        hidden, heads = self.count("embedding_length"), self.count("attention.head_count")
        if hidden % heads:
            raise self.wrong(f"attention.head_count is {heads} for embedding_length {hidden}")
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocabulary(),
            "n_embd": hidden,
            "n_inner": self.count("feed_forward_length", 4 * hidden),
            "n_layer": self.depth(),
            "n_head": heads,
            "n_positions": self.count("context_length"),
            "layer_norm_epsilon": self.positive("attention.layer_norm_epsilon"),
            **self.shared(),
        }

    def weight(self, kind: str, last: str, name: str, tensor: GgufTensor) -> Stored:
        found = stored(name, tensor, self.file.pages)
        turned = len(tensor.shape) == 2 and kind in self.layer
        return found.changed(_transposed) if turned else found


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()
