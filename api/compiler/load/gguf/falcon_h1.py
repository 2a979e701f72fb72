"""Falcon-H1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, TOP, Base, Modules
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._mamba import MAMBA, mamba, mamba_weight
from accel.compiler.load.gguf.qwen2moe import KINDS
from accel.ir.weights import Stored


@dataclass(frozen=True)
class FalconH1(Base):
    """Every layer attends and has a state. The factors of the model are in the weights of a file."""

    model_type = "falcon_h1"
    modules = Modules(
        {
            **LAYER,
            **MAMBA,
            "ffn_norm": "pre_ff_layernorm.weight",  # which a file has without a last part
            **{f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in KINDS},
        },
        top={**TOP, "output_norm": "model.final_layernorm"},
    )

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        names = (
            "embedding", "lm_head", "attention_in", "attention_out", "key", "ssm_in", "ssm_out",
        )  # fmt: skip
        return {
            **config,
            **mamba(metadata, config["hidden_size"]),
            "mamba_d_ssm": metadata.count("ssm.inner_size"),
            "mamba_rms_norm": metadata.holds("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "attention_bias": metadata.holds("attn_output.bias"),
            "mlp_bias": False,
            "projectors_bias": metadata.holds("ssm_out.bias"),
            **{f"{name}_multiplier": 1.0 for name in names},
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
        }

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        return mamba_weight(kind, super().weight(kind, name, tensor))
