"""`replay`: recurrent state as it is behind some of the tokens of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

TAKEN = (
    "taken."  # what the names of a step's outputs begin with that say what its recurrences took in
)


def taken_of(state: str, operand: str) -> str:
    """The output of the step, and input of `replay`, with an operand [B,T,…] of the recurrence of a state value."""
    return f"{TAKEN}{state}.{operand}"


class _Replay(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Random operands of two rows, of which the second ends earlier, over a random state. They are small, so that
        nothing grows.
        """
        import torch

        from accel.ir.entries._values import empty_state, numbers, random

        entry, generator = program.entries[name], random()
        found = {"positions": numbers([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]])}
        for operand in (n for n in entry.inputs if n.startswith(TAKEN)):
            sizes = [int(size) for size in entry.input(operand).meta["val"].shape[2:]]
            found[operand] = 0.1 * torch.randn((2, 5, *sizes), generator=generator)
        for state, blank in empty_state(program, entry, 2).items():
            found[state] = 0.1 * torch.randn(blank.shape, generator=generator)
        return found


REPLAY = _Replay("replay")
