"""Programs and operands on the device that Triton kernels run on: a GPU, or the CPU where they are interpreted."""

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
