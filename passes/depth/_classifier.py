"""What tells, by the residual stream behind a layer, whether the head would give the token of the last layer there:
CALM's linear classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from accel.ir.program import Program
from accel.passes.depth._routed import unit
from accel.passes.trained import Parts, Trained


@dataclass(frozen=True)
class ExitClassifier(Trained):
    """One of each layer but the last: linear, of the stream over the root of its mean square, to two numbers: another
    token, and the same. The model stays as it is.
    """

    key: ClassVar[str] = "calm"

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """See Trained."""
        return {"weight": (2, width), "bias": (2,)}

    def tensors(self, program: Program, keys: Mapping[int, fx.Node]) -> Parts:
        """See Trained."""
        lower = {layer: node for layer, node in keys.items() if layer < max(keys)}
        return super().tensors(program, lower) if lower else {}

    def start(self, width: int) -> dict[str, Tensor]:
        """The tensors of a layer that has learnt nothing."""
        return {"weight": torch.zeros(2, width), "bias": torch.zeros(2)}


def classified(after: Tensor, before: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """How likely it is that the token is the last layer's, of the stream [...,E] behind an exit: [...]."""
    return judged(after, weight, bias).softmax(-1)[..., 1]


def judged(after: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The two numbers [...,2]."""
    return F.linear(unit(after), weight, bias)


def lost(after: Tensor, same: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The cross-entropy [] of one layer's streams [N,E], of which `same` [N] have the last layer's token; both kinds
    weigh alike.
    """
    share = same.double().mean().clamp(0.5 / len(same), 1 - 0.5 / len(same))
    balance = torch.stack([0.5 / (1 - share), 0.5 / share]).float()
    each = F.cross_entropy(judged(after, weight, bias), same.long(), reduction="none")
    return (each * balance[same.long()]).mean()
