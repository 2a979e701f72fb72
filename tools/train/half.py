"""Whether products in bfloat16 are worth it here."""

from __future__ import annotations

import torch
from torch.utils import benchmark


def faster_in_half() -> bool:
    """Whether this processor multiplies bfloat16 at least 1.5 times as fast as float32 (AVX-512 BF16, AMX).

    One without instructions for it is not tried: a product takes it seconds.
    """
    if not any("bf16" in name and there for name, there in torch.cpu.get_capabilities().items()):
        return False

    def seconds(kind: torch.dtype) -> float:
        a, b = torch.ones(2048, 256, dtype=kind), torch.ones(256, 1024, dtype=kind)
        timer = benchmark.Timer(
            "a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads()
        )
        return min(timer.timeit(3).mean for _ in range(5))

    return seconds(torch.float32) > 1.5 * seconds(torch.bfloat16)
