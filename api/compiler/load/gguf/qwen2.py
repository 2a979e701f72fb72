"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from dataclasses import dataclass

from accel.compiler.load.gguf import Base


@dataclass(frozen=True)
class Qwen2(Base):
    """Queries, keys and values have biases."""

    model_type = "qwen2"
