"""gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf import LAYER, Base, Modules, slices
from accel.compiler.load.gguf._blocks import in_turn
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf.gemma2 import kinds
from accel.ir.weights import Experts, Stored


@dataclass(frozen=True)
class GptOss(Base):
    """Gates and ups of an expert are the even and odd columns of one matrix, and matrices of experts are transposed.
    As in llama.cpp, the bounds of YaRN's ramp are whole numbers.
    """

    model_type = "gpt_oss"
    modules = Modules(
        {
            **LAYER,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        joined={
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "mlp.experts.gate_up_proj",
            ("ffn_gate_exps.bias", "ffn_up_exps.bias"): "mlp.experts.gate_up_proj_bias",
            ("ffn_down_exps.weight",): "mlp.experts.down_proj",
        },
    )

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        count, used = metadata.experts_used()
        return {
            **config,
            "intermediate_size": metadata.count("expert_feed_forward_length"),
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": kinds(metadata.flags("attention.sliding_window_pattern", 2)),
        }

    def join(self, target: str, parts: Mapping[str, GgufTensor]) -> Stored:
        if target.endswith("bias"):
            return self.below(parts.items()).changed(_taken_in_turn)
        if len(parts) == 1:
            ((name, tensor),) = parts.items()
            return Experts.stack(self.experts(name, tensor), turned=True)
        (name, gates), (other, ups) = parts.items()
        if gates.shape != ups.shape or len(gates.shape) != 3:
            raise self.metadata.wrong(
                f"{name} is {list(gates.shape)} and {other} {list(ups.shape)}"
            )
        pages = self.metadata.file.pages
        both = zip(slices(gates), slices(ups), strict=True)
        return Experts.stack([in_turn(name, *pair, pages) for pair in both], turned=True)


def _taken_in_turn(value: Tensor) -> Tensor:
    """The biases of all gates and then of all ups, [2X,N] -> [X,2N], a gate and an up in turn."""
    found: Tensor = value.unflatten(0, (2, -1)).permute(1, 2, 0).flatten(1)
    return found
