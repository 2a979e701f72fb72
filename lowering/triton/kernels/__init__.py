"""Triton kernels, one a file. Each file says in VARIANTS what some launches of its kernels are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A launch of a kernel, as far as it is compiled: `types` names its operands by type, divided by blanks, and
    `constants` the values of the others. tests/lowering/triton_ahead.py compiles it for GPUs that need not be there.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
    since: int = 80  # capability of the GPUs that it is launched on, at least
