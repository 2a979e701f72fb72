"""KIVI (arXiv:2402.02750): 2- or 4-bit KV cache, keys per channel and values per token; the newest tokens
stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups


@dataclass(frozen=True)
class Kivi(Base):
    """`bits`: 2, 4 or 8. `group`: elements with a common scale and minimum (float16): tokens of a channel for keys,
    channels of a token for values. `residual`: at least so many tokens stay exact, and so many are quantised together.
    """

    bits: int = option(2, one_of=(2, 4, 8))
    group: int = option(32, least=1, most=1024)
    residual: int = option(128, least=1, multiple_of="group")
    key: ClassVar[str] = "kivi"
    small: ClassVar[Mapping[str, Any]] = {"group": 4, "residual": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4},
        {"bits": 8, "group": 8, "residual": 24},
    )

    @property
    def error(self) -> float:  # type: ignore[override]
        """Of random weights, where errors grow from layer to layer; in 2 bits it says no more than finite."""
        return {8: 0.1, 4: 1.0, 2: 4.0}[self.bits]

    @property
    def storage(self) -> Storage:
        return Storage(block=self.residual)

    def _groups(self, at: At) -> Groups:
        return Groups.by_role(at.role, self.bits, self.group, self.residual)

    def parts(self, at: At) -> Layout:
        return self._groups(at).parts(at.width)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return self._groups(at).encode(x)

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return self._groups(at).decode(parts, at.width)

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than half a step of its group, but for the ends, which are float16."""
        return self._groups(at).near(x, back)
