"""Qwen3.5."""

from __future__ import annotations

from dataclasses import dataclass

from accel.compiler.load.gguf import LAYER, Modules
from accel.compiler.load.gguf._delta import DELTA
from accel.compiler.load.gguf._tiled import TILED, Tiled


@dataclass(frozen=True)
class Qwen35(Tiled):
    """Every fourth layer attends, the others are gated delta rules."""

    model_type = "qwen3_5_text"
    modules = Modules({**LAYER, **DELTA, **TILED})
