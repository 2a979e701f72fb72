"""QuantSpec (arXiv:2502.10424): each number in 4 bits that a draft reads, and 4 more that make it one of 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.groups import near_by, packed, spread
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups

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
    error = 0.1  # of random weights, where errors grow from layer to layer
    small: ClassVar[Mapping[str, Any]] = {"group": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"group": 6},)

    @property
    def storage(self) -> Storage:
        return Storage(block=self.group, coarse=("", "scale", "least"))

    def _upper(self, at: At) -> Groups:
        return Groups.by_role(at.role, _BITS, self.group, self.group)

    def parts(self, at: At) -> Layout:
        found = self._upper(at).parts(at.width)
        return {**found, "lower": found[""]}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        upper = self._upper(at)
        found = upper.encode(x)
        lost = x - upper.blocks(found, at.width)
        scale = found["scale"].float() / _FINER
        step = spread(scale, self.group, at.width, self.group, upper.along)
        steps = (lost / step).round().clamp(-_FINER // 2, _FINER // 2 - 1)
        steps = torch.where(steps.isnan(), 0, steps + _FINER // 2)
        return {**found, "lower": packed(steps.long(), _BITS).flatten(-2)}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        """Of the upper bits alone, or of both."""
        return self._upper(at).decode(parts, at.width, parts.get("lower"))

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than a step of 8 bits; half of one, but where 8 of them were to be added."""
        return near_by(x, back, 1 / _SPAN / _FINER, self.group, self._upper(at).along)
