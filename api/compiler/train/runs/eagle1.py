"""Training of EAGLE's head (arXiv:2401.15077): at each place of a text it learns the model's next hidden state, from
noisy ones before it, and what the model's output head says of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.train.heads import Beside, HeadsRun
from accel.ir.capture.arch.eagle1 import Eagle1
from accel.ir.taps import FINAL
from accel.runtime.draft.eagle1 import Eagle1 as Eagle1Draft

SAID = 0.1  # what the loss of the tokens weighs beside that of the states
NOISE, USUAL = 0.1, 512  # of states, either way, in rows of so many tokens; more in shorter ones


@dataclass
class BesideEagle1(Beside):
    """A layer of the model's own sizes, which speaks by the model's output head."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        return (FINAL,)

    def made(self) -> Eagle1:
        head = Eagle1(self.layer, True, self.own_words)
        head.lm_head.weight = torch.nn.Parameter(self.output_head, requires_grad=False)
        return head

    def config(self) -> dict[str, Any]:
        return {**self.layer_config(), "architectures": ["LlamaForCausalLM"], "bias": True}


class Eagle1Run(HeadsRun):
    """Beside a model."""

    drafter = Eagle1Draft
    pair = BesideEagle1

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, float]]:
        h, says = self.soft.read(ids)
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        size = NOISE * USUAL / h.shape[1]
        noise = size * (2 * torch.rand(h.shape, generator=generator) - 1)
        places = torch.arange(h.shape[1] - 1)[None]
        e, head = self.soft.embedded(ids), self.soft.head
        found = head.guessed(e[:, 1:], (h + noise)[:, :-1], places)
        said, right = self.soft.taught(head.lm_head(found), says[:, 1:])
        return [(F.smooth_l1_loss(found, h[:, 1:]) + SAID * said, right)]
