"""Qwen3.5 with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf._delta import DELTA
from accel.compiler.load.gguf._file import GgufTensor
from accel.compiler.load.gguf._tiled import TILED, Tiled
from accel.compiler.load.gguf.qwen2moe import EXPERTS, SHARED, experts, row, shared
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Qwen35Moe(Tiled):
    """As Qwen3.5, with experts in every layer, and one that all tokens share."""

    model_type = "qwen3_5_moe_text"
    modules = Modules({**LAYER, **DELTA, **TILED, **SHARED}, EXPERTS)

    def config(self) -> dict[str, Any]:
        return {**super().config(), **experts(self.metadata), **shared(self.metadata)}

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        return super().weight(kind, name, row(kind, tensor))
