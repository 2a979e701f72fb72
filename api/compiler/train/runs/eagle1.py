"""Training of EAGLE's head (arXiv:2401.15077): at each place of a text it learns the model's next hidden state, from
noisy ones before it, and what the model's output head says of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accel.compiler.train.stated import BesideStates, StatedRun
from accel.ir.capture.arch.eagle1 import Eagle1
from accel.runtime.draft.eagle1 import Eagle1 as Eagle1Draft


@dataclass
class BesideEagle1(BesideStates):
    """A layer of the model's own sizes, which speaks by the model's output head."""

    def made(self) -> Eagle1:
        head = Eagle1(self.layer, True, self.own_words)
        head.lm_head.weight = torch.nn.Parameter(self.output_head, requires_grad=False)
        return head

    def config(self) -> dict[str, Any]:
        return {**self.layer_config(), "architectures": ["LlamaForCausalLM"], "bias": True}


class Eagle1Run(StatedRun):
    """Beside a model."""

    drafter = Eagle1Draft
    pair = BesideEagle1
