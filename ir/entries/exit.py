"""`exit`: what the output head makes of the residual stream behind any layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind

if TYPE_CHECKING:
    from torch import Tensor

STREAM, ROWS = "stream", "rows"  # inputs: rows of the stream [B,T,E], and which of them [B,N]
TOKEN, CHANCE = "token", "chance"  # outputs [B,N]: the likeliest token, and its probability


class _Exit(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Random streams of two rows, of which some are read."""
        import torch

        from accel.ir.entries._values import numbers, random

        width = int(program.entries[name].input(STREAM).meta["val"].shape[2])
        stream = torch.randn((2, 5, width), generator=random())
        return {STREAM: stream, ROWS: numbers([[0, 2, 4], [1, 1, 3]])}


EXIT = _Exit("exit", rounds=True, chooses=True)
