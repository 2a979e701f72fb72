"""`attend.<number>`: attention of some queries over some keys, by their positions, and its log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


def form_of(number: int) -> str:
    """The entry of one form of attention: sizes, scale, mask."""
    return f"{ATTEND.name}.{number}"


class _Attend(EntryKind):
    def names(self, facts: Facts) -> Sequence[str]:
        """By the plan of the prompt."""
        plan = facts.prefill.ranks if facts.prefill is not None else None
        return [form_of(i) for i in sorted(set(plan.forms))] if plan is not None else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows of queries between keys, of which some are padding; every query sees a key."""
        import torch

        from accel.ir.entries._values import random

        generator, found = random(), {}
        sizes = {"q": 5, "k": 9, "v": 9}
        for holder in program.entries[name].graph.find_nodes(op="placeholder"):
            key, shape = str(holder.target), holder.meta["val"].shape
            if key in sizes:
                size = 2, int(shape[1]), sizes[key], int(shape[3])
                found[key] = torch.randn(size, generator=generator)
        found["q_pos"] = torch.tensor([[8, 2, 3, 4, 12], [1, 9, 7, 5, 3]])
        found["k_pos"] = torch.tensor(
            [[2, 8, 12, 3, 4, 0, 1, -1, -1], [0, 9, 7, 5, 3, 1, 2, 4, -1]]
        )
        return found


ATTEND = _Attend("attend", feature="prefill")
