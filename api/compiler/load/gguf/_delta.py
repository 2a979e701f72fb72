"""Layers of gated delta rules as llama.cpp's files have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import Base, NextN
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._mamba import between, log_decay
from accel.compiler.load.gguf.gemma import less_one
from accel.ir.weights import Stored

DELTA = {
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log",
}  # fmt: skip


@dataclass(frozen=True)
class Delta(Base):
    """The weights of a file's norms are greater by one than the model's, but for those within these layers."""

    nextn = NextN(
        {
            "nextn.eh_proj": "mtp.fc",
            "nextn.enorm": "mtp.pre_fc_norm_embedding",
            "nextn.hnorm": "mtp.pre_fc_norm_hidden",
            "nextn.shared_head_norm": "mtp.norm",
        },
        "mtp.layers.0.",
    )

    def config(self) -> dict[str, Any]:
        metadata = self.metadata
        keys, values = self.heads()
        width = metadata.count("ssm.state_size")
        inner = metadata.count("ssm.inner_size")
        if inner % values or values % keys:
            raise metadata.wrong(
                f"ssm.inner_size is {inner} for {values} heads, and keys have {keys}"
            )
        return {
            **metadata.decoder(self.model_type, partial=True),
            "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
            "linear_key_head_dim": width,
            "linear_value_head_dim": inner // values,
            "linear_num_key_heads": keys,
            "linear_num_value_heads": values,
            "attention_bias": False,
            "layer_types": [
                "linear_attention" if flag else "full_attention" for flag in self._recurrent()
            ],
        }

    def heads(self) -> tuple[int, int]:
        """Heads of keys, and of values, of these layers."""
        return self.metadata.count("ssm.group_count"), self.metadata.count("ssm.time_step_rank")

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        found = super().weight(kind, name, tensor)
        if kind.endswith("norm") and kind != "ssm_norm":
            return found.changed(less_one)
        change = {"ssm_a": log_decay, "ssm_conv1d": between}.get(kind)
        return found if change is None else found.changed(change)

    def _recurrent(self) -> list[bool]:
        if self.metadata.has("attention.recurrent_layers"):
            return self.metadata.flags("attention.recurrent_layers", 0)
        return self.metadata.flags("full_attention_interval", 4)
