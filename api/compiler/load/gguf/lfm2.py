"""LFM2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import TOP, Base, Modules
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._mamba import between
from accel.ir.weights import Stored

OPERATORS = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}  # fmt: skip
ENDS = {**TOP, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}


@dataclass(frozen=True)
class Lfm2(Base):
    """A layer without heads of keys is a short convolution. The last norm has one of two names."""

    model_type = "lfm2"
    modules = Modules(OPERATORS, top=ENDS)

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        if metadata.has("attention.sliding_window"):
            raise metadata.wrong("it has windows, which the model of transformers has not")
        heads = metadata.layered("attention.head_count_kv")
        config = metadata.decoder(
            self.model_type, groups=metadata.sole_count("attention.head_count_kv")
        )
        return {
            **config,
            "norm_eps": config.pop("rms_norm_eps"),
            "layer_types": ["full_attention" if n else "conv" for n in heads],
            "conv_L_cache": metadata.count("shortconv.l_cache"),
            "conv_bias": metadata.holds("shortconv.conv.bias"),
            "block_auto_adjust_ff_dim": False,
        }

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        found = super().weight(kind, name, tensor)
        return (
            found.changed(between)
            if kind == "shortconv.conv" and name.endswith("weight")
            else found
        )
