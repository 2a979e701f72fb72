"""Gemma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf import Base
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored


@dataclass(frozen=True)
class Gemma(Base):
    """The weights of a file's norms are greater by one than the model's, which adds one."""

    model_type = "gemma"

    def config(self) -> dict[str, Any]:
        return {**super().config(), "hidden_activation": "gelu_pytorch_tanh"}

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        found = super().weight(kind, name, tensor)
        return found.changed(less_one) if kind.endswith("norm") else found


def less_one(weight: Tensor) -> Tensor:
    return weight - 1
