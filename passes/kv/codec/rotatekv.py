"""RotateKV (arXiv:2501.16383): keys and values in 2 bits, after rotations that spread outliers over channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups
from accel.passes.kv.codec._hadamard import rotated

_HEADS = 4  # that keys are rotated over together


@dataclass(frozen=True)
class Rotatekv(Tables, Base):
    """`bits`: 2, 4 or 8. `group`: channels of a token with a common scale and minimum (float16), of all heads in a row.
    `first`: so many tokens stay exact, the attention sinks. `recent`: at least so many of the newest do, too, and so
    many are encoded together.

    Values are rotated by a Hadamard matrix over each head. Keys, before RoPE, by one over 4 heads (2 or 1 where the
    heads are no multiple), and their channels then stand in the order of their sums over a text, so that those of a
    group are near one another. Where a size is no power of two, the rotation is over the largest that divides it.
    Rotating here gives the numbers of weights that are rotated beforehand, as in the paper. There the exact tokens are
    those with the 20 largest entries of a layer's input; every layer must hold the same ones here, so that they are the
    first.
    """

    bits: int = option(2, one_of=(2, 4, 8))
    group: int = option(128, least=1, most=4096)
    first: int = option(4, least=0, most=64)
    recent: int = option(32, least=1, most=1024)
    key: ClassVar[str] = "rotatekv"
    small: ClassVar[Mapping[str, Any]] = {"group": 4, "first": 2, "recent": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4, "group": 16},
        {"bits": 8, "first": 0, "recent": 8},
    )

    @property
    def error(self) -> float:  # type: ignore[override]
        """Of random weights, where errors grow from layer to layer; in 2 bits it says no more than finite."""
        return {8: 0.5, 4: 2.0, 2: 8.0}[self.bits]

    @property
    def storage(self) -> Storage:
        return Storage(block=self.recent, sinks=self.first, together=True, unrotated=True)

    def sizes(self, width: int, heads: int) -> Sizes:
        return {"order": (heads, width)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """The channels of rotated keys, smallest sum over all tokens first [G,D]."""
        sums: dict[int, Tensor] = {}
        for row in rows:
            for layer, x in row.layers.items():
                keys = x.keys if x.unrotated is None else x.unrotated
                sums[layer] = sums.get(layer, 0) + keys.double().sum((0, 2))  # [G,D]
        return {
            i: {"order": rotated(x.flatten(), _rotation("k", x)).argsort().view(x.shape)}
            for i, x in sums.items()
        }

    @property
    def _groups(self) -> Groups:
        return Groups(self.bits, self.group, "channels", self.recent)

    def parts(self, at: At) -> Layout:
        return self._groups.parts(at.width)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return self._groups.encode(self.turned(at, x))

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return self.turned_back(at, self._groups.decode(parts, at.width))

    def turned(self, at: At, x: Tensor) -> Tensor:
        """x [...,G D] -> what is quantised of it: rotated, in order, and no larger than x, for float16."""
        order = at.constants["order"]
        size = _rotation(at.role, order)
        x = rotated(x, size) / size
        return x[..., order.flatten()] if at.role == "k" else x

    def turned_back(self, at: At, x: Tensor) -> Tensor:
        """What `turned` did, undone."""
        order = at.constants["order"]
        x = x[..., order.flatten().argsort()] if at.role == "k" else x
        return rotated(x, _rotation(at.role, order))

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """Of what is quantised no number is off by more than half a step of its group, but for the ends, which are
        float16, and rounding of the rotations.
        """
        want, got = (self.turned(at, one) for one in (x, back))
        off = 1e-6 * x.norm(dim=-1, keepdim=True)
        return self._groups.near(want, got + (want - got).clamp(-off, off))


def _rotation(role: str, order: Tensor) -> int:
    """Numbers that are rotated together; order: [G,D]."""
    heads, width = map(int, order.shape)
    count = (math.gcd(heads, _HEADS) if role == "k" else 1) * width
    return count & -count  # the largest power of two that divides it
