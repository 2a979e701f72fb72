"""Text that shows a pass what a model reads: token ids, and others that what it did is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _silent(what: str, share: float) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Calibration:
    """Token ids [n,T] to calibrate on and, of other text, [m,T] to measure on.

    source: "given" by the user, "bundled" with accel, or "random" where the model has no tokenizer.
    progress: told what is being done, and the share of the pass that is done.
    """

    tokens: Tensor
    held_out: Tensor
    source: str
    progress: Callable[[str, float], None] = _silent

    @staticmethod
    def random(vocabulary: int, length: int, rows: int = 8) -> Calibration:
        """Tokens without meaning: they reach every weight, as text of the model's would not."""
        generator = torch.Generator().manual_seed(20)
        drawn = torch.randint(0, vocabulary, (rows + 2, length), generator=generator)
        return Calibration(drawn[:-2], drawn[-2:], "random")
