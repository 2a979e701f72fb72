"""Programs and operands on the device that Triton kernels run on: a GPU, or the CPU where they are interpreted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accel.ir.ops.attention import Mask, own_visible
from accel.ir.program import Program
from accel.lowering.triton import device
from accel.lowering.triton.lowered import Lowered, lower_program

TOLERANCE = 2e-5
needs_gpu = dict(
    condition=not torch.cuda.is_available(), reason="needs a CUDA GPU: kernels are interpreted here"
)


def on_device(values: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device()), values)


def run_program(program: Program, operands: list[Any]) -> list[Tensor]:
    """What a lowered program of inputs x0, x1, … gives, on the CPU."""
    lowered: Lowered = lower_program(program)
    given = {n: on_device(operands[int(n[1:])].clone()) for n in program.step.inputs}
    return [out.cpu() for out in lowered.run("step", given).values()]


def sees(operands: list[Any]) -> Tensor:
    """Which tokens of an attention's operands see a slot, bool [B,T]."""
    q_pos, k_pos, mask, window = operands[3], operands[4], operands[8], operands[9]
    seen = Mask(mask, window).visible(q_pos[:, :, None], k_pos[:, None, :])
    if len(operands) > 15 and operands[14] is not None:
        ahead = Mask(mask, window).visible(q_pos[:, :, None], k_pos[:, None, :], ahead=True)
        own, theirs = own_visible(operands[14], operands[15], k_pos.shape[1])
        seen = torch.where(own, theirs & ahead, seen)
    return seen.any(-1)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


class Walls:
    """Tensors of which nothing around them may be read or written: they lie amid what is no number, and codes amid the
    largest."""

    THICK = 64  # numbers

    def __init__(self):
        self._held = []

    def around(self, values: Any) -> Any:
        """The same on the device, amid walls; contiguous."""
        return torch.utils._pytree.tree_map_only(Tensor, self._built, values)

    def _built(self, tensor: Tensor) -> Tensor:
        worst = torch.nan if tensor.is_floating_point() else _most(tensor.dtype)
        room = torch.full(
            (tensor.numel() + 2 * self.THICK,), worst, dtype=tensor.dtype, device=device()
        )
        inside = room[self.THICK : self.THICK + tensor.numel()].view(tensor.shape)
        inside.copy_(tensor)
        self._held.append((room, room.clone(), tensor.numel()))
        return inside

    def check(self) -> None:
        """Raises AssertionError where a wall was written to."""
        for room, before, count in self._held:
            for side in (slice(0, self.THICK), slice(self.THICK + count, None)):
                torch.testing.assert_close(room[side], before[side], rtol=0, atol=0, equal_nan=True)


def _most(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def poisoned() -> Iterator[None]:
    """What a tensor holds before it is written is no number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
