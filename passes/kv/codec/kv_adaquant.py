"""KV-AdaQuant (arXiv:2502.15075): more bits for keys than for values, each token in steps of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.groups import block_sizes, group_dequantize, group_quantize, near
from accel.passes.kv.codec import Base, Sizes

_BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class KvAdaquant(Base):
    """`key_bits`, `value_bits`: 1, 2, 4 or 8. `group`: channels of a token with a common scale and minimum (float16).
    Errors of keys grow with the norm of the keys, which is larger than that of the values.
    """

    key_bits: int = option(4, one_of=_BITS)
    value_bits: int = option(2, one_of=_BITS)
    group: int = option(64, least=1, most=1024)
    small: ClassVar[Mapping[str, Any]] = {"group": 4}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"key_bits": 8, "value_bits": 4},
        {"key_bits": 2, "value_bits": 1, "group": 16},
    )

    @property
    def error(self) -> float:  # type: ignore[override]
        """Of random weights, where errors grow from layer to layer; below 4 bits it says no more than finite."""
        return {8: 0.5, 4: 2.0}.get(min(self.key_bits, self.value_bits), 8.0)

    def _bits(self, role: str) -> int:
        return self.key_bits if role == "k" else self.value_bits

    def _sizes(self, role: str, width: int) -> tuple[int, int]:
        return block_sizes(1, width, self._bits(role), self.group, "channels")

    def parts(self, role: str, width: int) -> dict[str, tuple[str, Sizes]]:
        codes, groups = self._sizes(role, width)
        half = ("float16", (groups,))
        return {"": ("uint8", (codes,)), "scale": half, "least": half}

    def encode(self, role: str, x: Tensor) -> dict[str, Tensor]:
        rows = x.unsqueeze(-2)  # each a block of its own
        codes, scale, least = group_quantize(rows, self._bits(role), self.group, "channels")
        return {"": codes, "scale": scale, "least": least}

    def decode(self, role: str, parts: dict[str, Tensor], width: int) -> Tensor:
        decoded: Tensor = group_dequantize(
            *parts.values(), self._bits(role), self.group, "channels", 1, width
        )
        return decoded

    def bits_of(self, role: str, width: int) -> float:
        codes, groups = self._sizes(role, width)
        return (8 * codes + 32 * groups) / width

    def within(self, role: str, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than half a step of its group, but for the ends, which are float16."""
        return near(x, back, self._bits(role), self.group, "channels")
