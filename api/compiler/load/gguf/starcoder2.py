"""StarCoder2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.compiler.load.gguf import LAYER, Base, Modules


@dataclass(frozen=True)
class Starcoder2(Base):
    """The MLP has no gate. Like llama.cpp, it has no window."""

    model_type = "starcoder2"
    modules = Modules({**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})

    def config(self) -> dict[str, Any]:
        config = super().config()
        epsilon, biased = config.pop("layer_norm_eps"), self.metadata.holds("attn_output.bias")
        return {**config, "norm_epsilon": epsilon, "sliding_window": None, "use_bias": biased}
