"""Training of Dovetail's head (arXiv:2412.18934), as that of EAGLE's: the model's next hidden state, and what its
output head says of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.heads.dovetail import published
from accel.compiler.train.stated import BesideStates, StatedRun
from accel.ir.capture.arch.dovetail import Dovetail
from accel.runtime.draft.dovetail import Dovetail as DovetailDraft

LAYERS = 2


@dataclass
class BesideDovetail(BesideStates):
    """Layers of the model's own sizes, which speak by the model's output head."""

    @cached_property
    def layer(self) -> Any:
        """See Beside: of all layers."""
        found = super().layer
        found.num_hidden_layers = LAYERS
        return found

    def made(self) -> Dovetail:
        head = Dovetail(self.layer, self.own_words)
        head.lm_head.weight = torch.nn.Parameter(self.output_head, requires_grad=False)
        return head

    def config(self) -> dict[str, Any]:
        return {
            **self.layer_config(),
            "num_hidden_layers": LAYERS,
            "architectures": ["LlamaForCausalLM"],
        }


class DovetailRun(StatedRun):
    """Beside a model."""

    drafter = DovetailDraft
    pair = BesideDovetail

    def saved(self) -> Mapping[str, Tensor]:
        """See HeadsRun."""
        return published(self.parts[0])
