"""What trainers share whose heads speak by the model's output head, without a norm before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from accel.compiler.train.heads import HeadsRun
from accel.compiler.train.sized import BesideSized


@dataclass
class BesideSpoken(BesideSized):
    """The head learns as if logits of size 1 came of what has size 1, at the usual rate; `size` is what has such with
    the model's own output head, and what is saved is so much smaller.
    """

    @cached_property
    def size(self) -> float:
        words = self.output_head
        return float(1 / words.std() / words.shape[1] ** 0.5)

    def spoken(self) -> nn.Parameter:
        """The output head that it learns with [Vd,E]."""
        return nn.Parameter(self.output_head * self.size, requires_grad=False)


class SpokenRun(HeadsRun):
    """summands: the parts whose outputs are added up to what the output head reads."""

    summands: ClassVar[tuple[str, ...]]

    def saved(self) -> Mapping[str, Tensor]:
        """Of the size that the model's output head reads."""
        return {
            n: self.soft.size * p if n.removesuffix(".weight") in self.summands else p
            for n, p in self.parts[0].items()
        }
