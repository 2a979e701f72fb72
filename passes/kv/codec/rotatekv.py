"""RotateKV (arXiv:2501.16383): keys and values in 2 bits, after rotations that spread outliers over channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups
from accel.passes.kv.codec._transform import Transform

_HEADS = 4  # that keys are rotated over together
_FLAT = 1e-3  # of a head's largest direction: none is taken for smaller


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

    `rotation`: "principal" is not the paper's: the directions of a head's keys in a text, about their mean, largest
    first, with 4 bits for a quarter of them, 2 for the next, 1 for the others; values by Hadamard. Each vector of a
    head has one scale (float16), and codes mean the points that fit a normal distribution best: 2 bits, and 16 / D.
    """

    bits: int = option(2, one_of=(2, 4, 8))
    rotation: str = option("hadamard", one_of=("hadamard", "principal"))
    group: int = option(128, least=1, most=4096)
    first: int = option(4, least=0, most=64)
    recent: int = option(32, least=1, most=1024)
    key: ClassVar[str] = "rotatekv"
    small: ClassVar[Mapping[str, Any]] = {"group": 4, "first": 2, "recent": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4, "group": 16},
        {"bits": 8, "first": 0, "recent": 8},
        {"rotation": "principal", "recent": 8},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotation == "principal" and self.bits != 2:
            raise RecipeError(
                f"{self.full_name}: bits is {self.bits}, but rotation = 'principal' has 2 on average; give 2"
            )

    @property
    def error(self) -> float:  # type: ignore[override]
        """Of random weights, where errors grow from layer to layer; in 2 bits it says no more than finite."""
        return {8: 0.5, 4: 2.0, 2: 8.0}[self.bits]

    @property
    def storage(self) -> Storage:
        return Storage(block=self.recent, sinks=self.first, together=True, unrotated=True)

    def sizes(self, width: int, heads: int) -> Sizes:
        rows = (heads, width)
        return {"order": rows, "middle": rows, "size": rows, "basis": (heads, width, width)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """The channels of rotated keys, smallest sum over all tokens first [G,D]; of each head's keys the mean [G,D],
        the directions about it, as columns [G,D,D], and how large they are [G,D].
        """
        sums: dict[int, list[Any]] = {}
        for row in rows:
            for layer, x in row.layers.items():
                keys = (x.keys if x.unrotated is None else x.unrotated).double()
                flat = keys.transpose(0, 1).flatten(1, 2)  # [G,tokens,D]
                new = [flat.shape[1], flat.sum(1), flat.mT @ flat]
                old = sums.get(layer, [0, 0, 0])
                sums[layer] = [a + b for a, b in zip(old, new, strict=True)]
        return {i: _measured(*found) for i, found in sums.items()}

    @property
    def _groups(self) -> Groups:
        return Groups(self.bits, self.group, "channels", self.recent)

    def _transform(self, at: At) -> Transform:
        heads, width = map(int, at.constants["size"].shape)
        kind = Transform.falling if at.role == "k" else Transform.level
        return kind(heads, width, self.recent)

    def parts(self, at: At) -> Layout:
        if self.rotation == "principal":
            return self._transform(at).parts()
        return self._groups.parts(at.width)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        if self.rotation == "principal":
            return self._transform(at).encode(_apart(at, x), _sizes(at))
        return self._groups.encode(self.turned(at, x))

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        if self.rotation == "principal":
            return _together(at, self._transform(at).decode(parts, _sizes(at)))
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
        float16, and rounding of the rotations; see `Transform.near` of "principal".
        """
        if self.rotation == "principal":
            want, got = (_apart(at, one) for one in (x, back))
            long = x.unflatten(-1, want.shape[-2:]).norm(dim=-1)
            if at.role == "k":
                long = long + at.constants["middle"].norm(dim=-1)
            near = self._transform(at).near(want, got, _sizes(at), 1e-4 * long + 1e-4)
            right: Tensor = near.all(-1)
            return right
        want, got = (self.turned(at, one) for one in (x, back))
        off = 1e-6 * x.norm(dim=-1, keepdim=True)
        return self._groups.near(want, got + (want - got).clamp(-off, off))


def _measured(count: int, total: Tensor, squares: Tensor) -> dict[str, Tensor]:
    """The constants of a layer, of the sum [G,D] of the keys of so many tokens, and of their outer products [G,D,D]."""
    middle = total / count
    spread = squares / count - middle[..., None] * middle[..., None, :]
    size, basis = (x.flip(-1) for x in torch.linalg.eigh(spread))
    size = size.clamp(min=0).sqrt()
    least = (size[..., :1] * _FLAT).clamp(min=1e-6)
    return {
        "order": _rotated(total.flatten(), _rotation("k", total)).argsort().view(total.shape),
        "middle": middle.float(),
        "size": torch.maximum(size, least).float(),
        "basis": basis.float().contiguous(),
    }


def _sizes(at: At) -> Tensor:
    """How large the numbers are that `_apart` gives [G,D]."""
    size = at.constants["size"]
    return size if at.role == "k" else torch.ones_like(size)


def _apart(at: At, x: Tensor) -> Tensor:
    """x [...,G D] -> [...,G,D] in the directions that are encoded."""
    basis = at.constants["basis"]
    turned: Tensor = x.unflatten(-1, tuple(basis.shape[:2]))
    if at.role == "k":
        turned = ((turned - at.constants["middle"])[..., None, :] @ basis).squeeze(-2)
    else:
        size = _rotation("v", basis[..., 0])
        turned = _rotated(turned, size) / size**0.5
    return turned


def _together(at: At, x: Tensor) -> Tensor:
    """What is read, [B,G,T,D] in those directions, as it was: [B,1,T,G D]."""
    basis = at.constants["basis"]
    if at.role == "k":
        back = x @ basis.mT + at.constants["middle"][:, None]
    else:
        size = _rotation("v", basis[..., 0])
        back = _rotated(x, size) / size**0.5
    joined: Tensor = back.transpose(1, 2).flatten(2)[:, None]
    return joined


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
