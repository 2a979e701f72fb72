"""QuantSpec (arXiv:2502.10424): each number in 4 bits that a draft reads, and 4 more that make it one of 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.groups import (
    block_sizes,
    group_dequantize,
    group_quantize,
    near_by,
    packed,
    spread,
)
from accel.passes.kv.codec import Base, Sizes

_BITS = 4  # of either half
_SPAN = 2**_BITS - 1  # steps between the ends of a group
_FINER = 2**_BITS


@dataclass(frozen=True)
class QuantspecKv(Base):
    """A block of R = `group` tokens: of each number U, in steps S between the ends of its group, and L, in steps of
    S / 16 what is off then: -8 to 7. A call that reads coarsely reads m + U S, others m + U S + L S / 16.

    `group`: elements with a common S and m (float16): tokens of a channel for keys, channels of a token for values. So
    many tokens at least stay exact, and less than two times as many: the paper's two buffers.
    """

    group: int = option(128, least=1, most=1024)
    key: ClassVar[str] = "quantspec-kv"
    coarse: ClassVar[tuple[str, ...]] = ("", "scale", "least")
    error = 0.1  # of random weights, where errors grow from layer to layer
    small: ClassVar[Mapping[str, Any]] = {"group": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"group": 6},)

    @property
    def block(self) -> int:
        return self.group

    def _along(self, role: str) -> str:
        return "rows" if role == "k" else "channels"

    def parts(self, role: str, width: int) -> dict[str, tuple[str, Sizes]]:
        codes, groups = block_sizes(self.block, width, _BITS, self.group, self._along(role))
        half, nibbles = ("float16", (groups,)), ("uint8", (codes,))
        return {"": nibbles, "scale": half, "least": half, "lower": nibbles}

    def encode(self, role: str, x: Tensor) -> dict[str, Tensor]:
        width, along = int(x.shape[-1]), self._along(role)
        upper, scale, least = group_quantize(x, _BITS, self.group, along)
        found = {"": upper, "scale": scale, "least": least}
        lost = x - self.decode(role, found, width).unflatten(2, (-1, self.block))
        step = spread(scale.float() / _FINER, self.block, width, self.group, along)
        steps = (lost / step).round().clamp(-_FINER // 2, _FINER // 2 - 1)
        steps = torch.where(steps.isnan(), 0, steps + _FINER // 2)
        return {**found, "lower": packed(steps.long(), _BITS).flatten(-2)}

    def decode(self, role: str, parts: dict[str, Tensor], width: int) -> Tensor:
        """Of the upper bits alone, or of both."""
        back: Tensor = group_dequantize(
            parts[""], parts["scale"], parts["least"], _BITS, self.group, self._along(role), self.block, width,
            parts.get("lower"),
        )  # fmt: skip
        return back

    def bits_of(self, role: str, width: int) -> float:
        codes, groups = block_sizes(self.block, width, _BITS, self.group, self._along(role))
        return (16 * codes + 32 * groups) / (self.block * width)

    def within(self, role: str, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than a step of 8 bits; half of one, but where 8 of them were to be added."""
        return near_by(x, back, 1 / _SPAN / _FINER, self.group, self._along(role))
