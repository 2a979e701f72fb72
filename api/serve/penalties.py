"""OpenAI's `presence_penalty` and `frequency_penalty`, as a logits processor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.runtime.backends.protocol import Logits
from accel.runtime.inputs.ints import Ints


@dataclass(frozen=True)
class Penalties:
    """Lowers the logits of tokens that the text already has: by `presence` once, and by `frequency` each time.
    `start`: tokens of the prompt, which do not count.
    """

    presence: float
    frequency: float
    start: int

    def __call__(self, seen: Ints, logits: Logits) -> Logits:
        """Logits [V] behind tokens `seen` [n]; written in place."""
        tokens, counts = np.unique(seen[self.start :], return_counts=True)
        logits[tokens] -= self.presence + self.frequency * counts
        return logits
