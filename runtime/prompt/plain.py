"""The model reads a prompt as it is."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.inputs.ints import Ints
from accel.runtime.prompt import Base


@dataclass(frozen=True)
class Plain(Base):
    """Nothing is added."""

    grade = "lossless"

    def read(self, prompt: Ints, vocab_size: int) -> Ints:
        return prompt
