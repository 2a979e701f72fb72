"""Mistral Small 3.1 and later, and Ministral 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf._paired import Paired


@dataclass(frozen=True)
class Mistral3(Paired):
    """Ministral 3 scales queries by their position, and rotates as YaRN does with a factor of scores of its own."""

    model_type = "mistral"

    def config(self) -> dict[str, Any]:
        config, metadata = super().config(), self.metadata
        if not metadata.has("attention.temperature_scale"):
            return {**config, "sliding_window": None}
        rope = config["rope_parameters"]
        if rope["rope_type"] != "yarn":
            raise metadata.wrong("attention.temperature_scale comes without YaRN")
        own = metadata.positive("rope.scaling.yarn_log_multiplier", 1.0)
        beta = metadata.positive("attention.temperature_scale")
        rope = {**rope, "mscale": own, "mscale_all_dim": own, "llama_4_scaling_beta": beta}
        return {**config, "model_type": "ministral3", "rope_parameters": rope}
