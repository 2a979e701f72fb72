"""Token ids behind a model's vocabulary: a step reads them, and no logits say them."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Positive


@dataclass(frozen=True)
class ExtraIds:
    """count: how many; the first is the size of the vocabulary."""

    count: Positive
