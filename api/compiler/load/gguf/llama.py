"""Llama and Mistral; Mixtral where there are experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.gguf import FACTORS, LAYER, Base, Modules
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Llama(Base):
    """The rotary pairs of a file are neighbours, those of the model halves of a head."""

    model_type = "llama"
    modules = Modules(
        {**LAYER, "ffn_gate_inp": "mlp.gate"},
        {
            "ffn_gate_exps": "mlp.experts.{}.w1",
            "ffn_down_exps": "mlp.experts.{}.w2",
            "ffn_up_exps": "mlp.experts.{}.w3",
        },
    )
    read_apart = (FACTORS,)

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        if metadata.has("expert_count") and metadata.count("expert_count") > 1:
            count, used = metadata.experts_used()
            return {
                **config,
                "model_type": "mixtral",
                "num_local_experts": count,
                "num_experts_per_tok": used,
            }
        biased = "blk.0.attn_output.bias" in metadata.file.tensors
        return {**config, "attention_bias": biased, "mlp_bias": False}

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        heads = dict(zip(("attn_q", "attn_k"), self.metadata.heads(), strict=True))
        rows = tensor.shape[0]
        if kind not in heads:
            return super().weight(kind, name, tensor)
        if rows % (2 * heads[kind]):
            raise self.metadata.wrong(f"{name} is {list(tensor.shape)} for {heads[kind]} heads")
        return stored(name, tensor, self.metadata.file.pages, paired(rows, heads[kind]))


def paired(rows: int, heads: int) -> Tensor:
    """Rows [rows] of queries or keys where the rotary pairs are halves of a head, in a file where they are
    neighbours.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
