"""KV-AdaQuant (arXiv:2502.15075): more bits for keys than for values, each token in steps of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.passes.kv.codec import At, Base, Layout
from accel.passes.kv.codec._groups import Groups

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

    def _groups(self, at: At) -> Groups:
        return Groups(self.key_bits if at.role == "k" else self.value_bits, self.group, "channels")

    def parts(self, at: At) -> Layout:
        return self._groups(at).parts(at.width)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return self._groups(at).encode(x.unsqueeze(-2))  # each token a block of its own

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return self._groups(at).decode(parts, at.width)

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than half a step of its group, but for the ends, which are float16."""
        return self._groups(at).near(x, back)
