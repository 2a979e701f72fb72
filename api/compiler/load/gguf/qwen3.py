"""Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

from accel.compiler.load.gguf import LAYER, Base, Modules

HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Qwen3(Base):
    """Queries and keys are normalised."""

    model_type = "qwen3"
    modules = Modules({**LAYER, **HEAD_NORMS})
