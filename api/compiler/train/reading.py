"""What trainers share whose heads attend to the keys of the model's last layer as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from accel.compiler.train.sized import BesideSized
from accel.ir.errors import InputError
from accel.ir.facts import LayerFacts
from accel.ir.ops.rope import rope
from accel.ir.region import Region, layer_calls
from accel.runtime.draft._published import glide_taps


@dataclass
class BesideReading(BesideSized):
    """Its head turns queries as the model turns its keys."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        return glide_taps({}, layers)

    @property
    def attends(self) -> LayerFacts:
        """The model's last layer."""
        return self.program.facts.layers[-1]

    @property
    def attention_sizes(self) -> dict[str, int]:
        """Of the model's last layer, for a configuration."""
        last = self.attends
        return {
            "num_attention_heads": last.num_heads,
            "num_key_value_heads": last.num_kv_heads,
            "head_dim": last.head_dim,
            "max_position_embeddings": self.program.facts.max_context + 1,
        }

    @property
    def turns(self) -> dict[str, Any]:
        """How the model's configuration says that keys are turned."""
        usual = {"rope_type": "default", "rope_theta": 10000.0}
        return self.text_config.get("rope_parameters") or usual

    def check_turns(self, rotary: nn.Module) -> None:
        """Raise InputError where the model's last layer does not turn its keys as this does."""
        region = layer_calls(self.program.step.graph)[-1].target
        assert isinstance(region, Region)
        sites = region.graph.find_nodes(op="call_function", target=rope.default)
        places = torch.arange(min(64, self.program.facts.max_context))[None]
        cos, sin = rotary(torch.zeros(1), places)
        mine = [t[0, :, : t.shape[2] // 2] for t in (cos, sin)]
        if sites and all(self._turns(node, mine) for node in sites):
            return
        raise InputError(
            f"{self.method.key}: the last layer of this model does not turn its keys as Llama does, and the head reads "
            "them as they are; train another head, such as eagle3"
        )

    def _turns(self, node: fx.Node, mine: list[Tensor]) -> bool:
        """Whether a turn is by these tables [P,D/2], each half of the channels with the other."""
        *tables, interleaved = node.args[2:]
        theirs = [self.program.params[str(t.target)][: len(mine[0])] for t in tables]  # type: ignore[union-attr]
        return not interleaved and all(
            a.shape == b.shape and torch.allclose(a, b.float(), atol=1e-4)
            for a, b in zip(mine, theirs, strict=True)
        )
