"""Llama and Mistral; Mixtral where there are experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accel.compiler.load.gguf import Base, paired
from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored

_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Llama(Base):
    """The rotary pairs of a file are neighbours, those of the model halves of a head."""

    model_type = "llama"
    layer = {**Base.layer, "ffn_gate_inp": "mlp.gate"}
    experts = {
        "ffn_gate_exps": "mlp.experts.{}.w1",
        "ffn_down_exps": "mlp.experts.{}.w2",
        "ffn_up_exps": "mlp.experts.{}.w3",
    }
    read_apart = (_FACTORS,)

    def config(self) -> dict[str, Any]:
        config = super().config()
        if self._has("expert_count") and self.count("expert_count") > 1:
            count, used = self.experts_used()
            return {
                **config,
                "model_type": "mixtral",
                "num_local_experts": count,
                "num_experts_per_tok": used,
            }
        biased = "blk.0.attn_output.bias" in self.file.tensors
        return {**config, "attention_bias": biased, "mlp_bias": False}

    def weight(self, kind: str, last: str, name: str, tensor: GgufTensor) -> Stored:
        heads = dict(zip(("attn_q", "attn_k"), self.heads(), strict=True))
        rows = tensor.shape[0]
        if kind not in heads:
            return stored(name, tensor, self.file.pages)
        if rows % (2 * heads[kind]):
            raise self.wrong(f"{name} is {list(tensor.shape)} for {heads[kind]} heads")
        return stored(name, tensor, self.file.pages, paired(rows, heads[kind]))

    def adapt(self, model: Any) -> None:
        """Divide the rotary frequencies by the file's factors, as Llama 3.1 has them."""
        if _FACTORS not in self.file.tensors:
            return
        factors = self.factors(_FACTORS)
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                with torch.no_grad():
                    buffer.div_(factors)
