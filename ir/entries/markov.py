"""`markov`: what the token before changes in what a head says of a place of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.draft_head import CANDIDATES, HIDDEN, STATE
from accel.ir.draft_head import MARKOV as NAME
from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


class _Markov(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        head = facts.draft_head
        return [] if head is None or not head.markov else [self.name]

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """A token of two rows, and random numbers and candidates."""
        import torch

        from accel.ir.entries._values import call, random

        head, found = program.facts.draft_head, {"tokens": call(program, 2, 1)["tokens"]}
        for one, width in ((HIDDEN, head.hidden), (STATE, head.state)):
            if width:
                found[one] = torch.randn((2, 1, width), generator=random())
        if head.candidates:
            size = 2, 1, head.candidates
            found[CANDIDATES] = torch.randint(program.facts.vocab_size, size, generator=random())
        return found


MARKOV = _Markov(NAME, rounds=True, feature="draft_head")
