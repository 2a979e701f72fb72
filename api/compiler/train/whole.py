"""A model over state that reads whole rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.entries.step import LOGITS
from accel.ir.program import Program
from accel.passes.calibrate import feeds


class Whole:
    """A program over state that reads rows from their first token on; also as a session that `sample` asks."""

    def __init__(self, program: Program):
        self.program, self.vocab_size = program, program.facts.vocab_size

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def logits(self, tokens: Tensor) -> Tensor:
        """[B,T,V] of tokens [B,T]."""
        with torch.no_grad():
            found: dict[str, Tensor] = self.program.run("step", feeds(self.program, "step", tokens))
        return found[LOGITS].float()

    def run(self, tokens: Any) -> Any:
        """The same, of arrays."""
        return self.logits(torch.from_numpy(tokens)).numpy()
