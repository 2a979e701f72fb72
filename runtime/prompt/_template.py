"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.prompt import Base


@dataclass(frozen=True)
class Template(Base):
    """What the model reads of a prompt: here, its last token `times` times."""

    times: int = option(2, least=1, most=512)

    def read(self, prompt: Ints, vocab_size: int) -> Ints:
        return np.append(prompt, np.repeat(prompt[-1:], self.times - 1))
