"""Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules, runs
from accel.compiler.load.gguf._delta import DELTA, Delta
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf.qwen2moe import EXPERTS, SHARED, experts, row, shared
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Qwen3Next(Delta):
    """One matrix of the model makes queries, keys, values and gates of each head of keys; a file has two, the parts of
    all heads one below the other.
    """

    model_type = "qwen3_next"
    modules = Modules(
        {
            **LAYER,
            **DELTA,
            **SHARED,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",
        },
        EXPERTS,
        joined={("attn_qkv.weight", "attn_gate.weight"): "linear_attn.in_proj_qkvz.weight"},
    )

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        return {**config, **experts(metadata), **shared(metadata), "norm_topk_prob": True}

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        return super().weight(kind, name, row(kind, tensor))

    def join(self, target: str, parts: Mapping[str, GgufTensor]) -> Stored:
        (name, first), (other, gates) = parts.items()
        keys, values = self.heads()
        width, each = (
            self.metadata.count("ssm.state_size"),
            self.metadata.count("ssm.inner_size") // keys,
        )
        counts = [width] * 2 * keys + [each] * keys
        for one, tensor, rows in ((name, first, sum(counts)), (other, gates, keys * each)):
            if tensor.shape[0] != rows:
                raise self.metadata.wrong(
                    f"{one} is {list(tensor.shape)}, and it should have {rows} rows"
                )
        runs_of = runs(first, counts)
        query, key, value = (runs_of[i * keys : (i + 1) * keys] for i in range(3))
        found = list[tuple[str, GgufTensor]]()
        for q, k, v, z in zip(query, key, value, runs(gates, [each] * keys), strict=True):
            found += [(name, q), (name, k), (name, v), (other, z)]
        return self.below(found)
