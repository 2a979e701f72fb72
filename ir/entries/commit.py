"""`commit`: keeps one path of a tree of guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor


class _Commit(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Random whole numbers in the slots of two rows."""
        import torch

        from accel.ir.entries._values import empty_state, numbers, random

        generator = random()
        found: dict[str, Tensor] = {}
        found["slots"] = numbers([3, 0])
        found["path"] = numbers([[0, 2, 3, 3], [0, 1, 2, 3]])
        found["positions"] = numbers([[3, 4, 5, -1], [0, -1, -1, -1]])
        for state, blank in empty_state(program, program.entries[name], 2).items():
            found[state] = torch.randint(-9, 9, blank.shape, generator=generator).to(blank.dtype)
        return found


COMMIT = _Commit("commit", threads=1, error=0.0)  # it copies; threads would start too late
