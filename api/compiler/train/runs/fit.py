"""What foretells attention (`Fitted`): it learns from what the model reads of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.compiler.over_state import keys_of
from accel.compiler.train.run import Run
from accel.ir.program import Program
from accel.passes.kv._shared.tables import observed
from accel.passes.trained import Fitted, Parts, sample


class Fit:
    """A program, and a method that foretells its attention."""

    def __init__(self, program: Program, method: Fitted):
        self.program, self.method = program, method

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, keys_of(self.program))

    def rows(self, ids: Tensor, known: Tensor) -> Any:
        """What each layer's attention reads of rows [B,T+1]."""
        return next(observed(self.program, [(ids, known)]))

    def start(self, inner: int, seed: int) -> Parts:
        """For what the program reads of a few tokens, of whatever kind."""
        ids = torch.arange(9)[None] % self.program.facts.vocab_size
        generator = torch.Generator().manual_seed(seed)
        return self.method.start(self.rows(ids, torch.ones(1, 8)), inner, generator)


class FitRun(Run):
    """By the method's own loss."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Fitted)

    @classmethod
    def over(cls, program: Program, method: Any) -> Fit:
        """See Run."""
        return Fit(program, method)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        lost = self.soft.method.loss(self.parts, self.soft.rows(ids, known), self.progress)
        self.descend(lost)
        return {"loss": lost.item()}
