"""Training of Medusa's heads (arXiv:2401.10774): each learns what the model says so many tokens further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel.compiler.train.heads import BesideIndependent, IndependentRun
from accel.ir.capture.arch.medusa import Medusa
from accel.runtime.draft.medusa import Medusa as MedusaDraft

HEADS = 4
_PREFIX = "heads."


@dataclass
class BesideMedusa(BesideIndependent):
    """Heads of one block, that begin as the model's output head."""

    def made(self) -> nn.Module:
        some = None if self.ids is None else len(self.ids)
        head = Medusa(self.program.facts.vocab_size, self.width, HEADS, 1, some)
        with torch.no_grad():
            for one in head.heads:
                one[-1].weight.copy_(self.output_head)  # type: ignore[index]
        return head

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "medusa_num_heads": HEADS,
            "medusa_num_layers": 1,
            **super().config(),
        }


class MedusaRun(IndependentRun):
    """Beside a model."""

    drafter = MedusaDraft
    pair = BesideMedusa

    def saved(self) -> Mapping[str, Tensor]:
        return {n.removeprefix(_PREFIX): p for n, p in self.parts[0].items()}
