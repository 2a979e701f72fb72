"""Training of the heads of blockwise parallel decoding (arXiv:1811.03115): each learns what the model says so many
tokens further, all in each step. The words are the model's and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel.compiler.train.heads import BesideIndependent, IndependentRun
from accel.ir.capture.arch.bpd import Bpd
from accel.runtime.draft.bpd import Bpd as BpdDraft

HEADS = 4
SHARE = 2  # how many times narrower the layer of a head is than the model


@dataclass
class BesideBpd(BesideIndependent):
    """Heads that begin near the model's own output head."""

    def made(self) -> nn.Module:
        some, width = None if self.ids is None else len(self.ids), self.width
        head = Bpd(self.program.facts.vocab_size, width, HEADS, width // SHARE, some)
        hidden, _ = self.read(self.text[:1])
        with torch.no_grad():
            head.lm_head.weight.copy_(self.output_head)
            head.norm.weight.fill_(float(hidden.std(-1).mean()))
            head.output.weight.zero_()
            head.output.bias.zero_()
        head.lm_head.requires_grad_(False)
        return head

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["BlockwiseParallel"],
            "bpd_num_heads": HEADS,
            "bpd_inner_size": self.width // SHARE,
            **super().config(),
        }


class BpdRun(IndependentRun):
    """Beside a model."""

    drafter = BpdDraft
    pair = BesideBpd

    def saved(self) -> Mapping[str, Tensor]:
        return {**self.parts[0], "lm_head.weight": self.soft.head.lm_head.weight}
