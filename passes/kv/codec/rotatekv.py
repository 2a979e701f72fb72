"""RotateKV (arXiv:2501.16383): keys and values in 2 bits, after rotations that spread outliers over channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups

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
            i: {"order": _rotated(x.flatten(), _rotation("k", x)).argsort().view(x.shape)}
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
        x = _rotated(x, size) / size
        return x[..., order.flatten()] if at.role == "k" else x

    def turned_back(self, at: At, x: Tensor) -> Tensor:
        """What `turned` did, undone."""
        order = at.constants["order"]
        x = x[..., order.flatten().argsort()] if at.role == "k" else x
        return _rotated(x, _rotation(at.role, order))

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


def _rotated(x: Tensor, size: int) -> Tensor:
    """Each `size` numbers of x [...,n size] times a Hadamard matrix of -1 and 1, which is `size` times its own inverse;
    as two products, since the matrix is the Kronecker product of two smaller ones.
    """
    power = size.bit_length() - 1
    one, two = (_hadamard(1 << n, x) for n in (power // 2, power - power // 2))
    parts = x.unflatten(-1, [-1, one.shape[0], two.shape[0]])
    # Matrices on the right and flat on the left: ONNX Runtime multiplies others by nothing where there are no blocks.
    aside = (parts @ two).mT.flatten(-3, -2)  # [...,n two,one]
    back: Tensor = (aside @ one).unflatten(-2, [-1, two.shape[0]]).mT.flatten(-3)
    return back


def _hadamard(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix [size,size]: -1 where the numbers of a row and a column share an odd number of bits."""
    at = torch.arange(size, device=like.device)
    bits = 2 ** torch.arange(size.bit_length(), device=like.device)
    both = ((at[:, None] & at)[..., None] // bits % 2).sum(-1)
    return (1 - 2 * (both % 2)).to(like.dtype)
