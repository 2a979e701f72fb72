"""Granite 4 with Mamba layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._mamba import MAMBA, mamba, mamba_weight
from accel.compiler.load.gguf.granite import Granite
from accel.compiler.load.gguf.granitemoe import EXPERTS, ROUTER, SHARED
from accel.ir.weights import Stored

_DENSE = {  # of layers without experts
    ("ffn_gate.weight", "ffn_up.weight"): "shared_mlp.input_linear.weight",
    ("ffn_down.weight",): "shared_mlp.output_linear.weight",
}
_ATTENTION = {k: v for k, v in LAYER.items() if k not in ("ffn_gate", "ffn_up", "ffn_down")}


@dataclass(frozen=True)
class GraniteHybrid(Granite):
    """A layer without heads of keys is Mamba's. The model has no positions unless the file says that it was trained
    with them.
    """

    model_type = "granitemoehybrid"
    modules = Modules({**_ATTENTION, **ROUTER, **MAMBA}, joined={**EXPERTS, **SHARED, **_DENSE})

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        kinds = ["attention" if n else "mamba" for n in metadata.layered("attention.head_count_kv")]
        config = metadata.decoder(
            self.model_type, groups=metadata.sole_count("attention.head_count_kv")
        )
        experts = metadata.number("expert_count", 0) > 0
        count, used = metadata.experts_used() if experts else (0, 0)
        shared = metadata.count("expert_shared_feed_forward_length", config["intermediate_size"])
        return {
            **config,
            **self.factors(),
            **mamba(metadata, config["hidden_size"]),
            "layer_types": kinds,
            "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned") else None,
            "attention_bias": metadata.holds("attn_output.bias"),
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "shared_intermediate_size": shared,
        }

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        return mamba_weight(kind, super().weight(kind, name, tensor))
