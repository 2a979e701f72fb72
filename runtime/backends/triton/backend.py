"""The Triton target: one compiled program per model, and sessions over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel.lowering.triton.lowered import Lowered
from accel.runtime.backends.triton.memory import DeviceArray, room
from accel.runtime.backends.triton.session import TritonSession


class TritonBackend:
    """Sessions over one lowered program; they share its parameters on the device."""

    tuning = threads = cost_key = None

    def __init__(self, program: Lowered):
        self.program = program
        self.state, self.entries = program.state, program.entries

    def open_session(self, batch: int) -> TritonSession:
        """A backend session for `batch` rows with an empty cache."""
        return TritonSession(self.program, batch, self.program.device)

    def pool(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """See protocol.Backend. On the device: steps read blocks where they lie."""
        with room():
            return DeviceArray(
                torch.zeros(*shape, dtype=getattr(torch, dtype), device=self.program.device)
            )

    def close(self) -> None:
        """Let go of the parameters on the device; they are freed when the last session closes."""
        self.program.compiled, self.program.tensors = {}, {}
