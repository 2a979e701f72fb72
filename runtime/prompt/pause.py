"""Pause tokens (arXiv:2310.02226): the model reads some tokens that say nothing before it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.inputs.ints import Ints
from accel.runtime.prompt import Base


@dataclass(frozen=True)
class Pause(Base):
    """`pauses` pause tokens follow each prompt; the first new token comes behind the last of them. They have positions,
    stay in the cache and count as tokens of the prompt. 0: the model as it is.

    A pause is no token of the vocabulary: its one embedding was trained (`accel-compile train pause`) beside a model
    that stays as it is, and the output head does not know it. `trained`: its file; empty: the one that a build finds.
    """

    pauses: int = option(10, least=0, most=512)
    trained: str = ""

    key: ClassVar[str] = "pause"
    lacks = "training of the model itself with pauses"
    small = {"pauses": 3}

    @property
    def breaks(self) -> frozenset[Invariant]:
        return frozenset({Invariant.TEXT_PROMPT}) if self.pauses else frozenset()

    def read(self, prompt: Ints, vocab_size: int) -> Ints:
        return np.append(prompt, np.full(self.pauses, vocab_size, np.int64))

    def steps(self) -> list[Any]:
        """See Base."""
        from accel.passes.state.extra_ids import ExtraIdsPass

        return [ExtraIdsPass(self)] if self.pauses else []
