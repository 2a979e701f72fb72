"""`fuse`: what a target's outputs become for a head that drafts by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.draft_head import FUSE as NAME
from accel.ir.draft_head import TAPS
from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


class _Fuse(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """None where outputs are features as they are."""
        head = facts.draft_head
        return [] if head is None or not head.fused else [self.name]

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Random numbers for some tokens of two rows."""
        import torch

        from accel.ir.entries._values import random

        width = program.facts.draft_head.tap_width
        return {TAPS: torch.randn((2, 5, width), generator=random())}


FUSE = _Fuse(NAME, rounds=True, feature="draft_head")
