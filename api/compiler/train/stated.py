"""What trainers share whose heads learn the model's next hidden state, from noisy ones before it, and what the model's
output head says of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.train.heads import Beside, HeadsRun
from accel.ir.taps import FINAL

SAID = 0.1  # what the loss of the tokens weighs beside that of the states
NOISE, USUAL = 0.1, 512  # of states, either way, in rows of so many tokens; more in shorter ones


@dataclass
class BesideStates(Beside):
    """A head that reads what the model's output head reads, and speaks by that."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        return (FINAL,)


class StatedRun(HeadsRun):
    """Beside a model. Its head has `guessed`: features of next tokens, by embeddings, features and places."""

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        h, says = self.soft.read(ids)
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        size = NOISE * USUAL / h.shape[1]
        noise = size * (2 * torch.rand(h.shape, generator=generator) - 1)
        places = torch.arange(h.shape[1] - 1)[None]
        e, head = self.soft.embedded(ids), self.soft.head
        found = head.guessed(e[:, 1:], (h + noise)[:, :-1], places)
        said, right = self.soft.taught(head.lm_head(found), says[:, 1:])
        return [(F.smooth_l1_loss(found, h[:, 1:]) + SAID * said, right)]
