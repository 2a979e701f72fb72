"""Keys in the directions in which a text's keys are large, 2 bits on average; values rotated, in 2 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._hadamard import rotated
from accel.passes.kv.codec._transform import Transform

_FLAT = 1e-3  # of a head's largest direction: none is taken for smaller


@dataclass(frozen=True)
class KvPrincipal(Tables, Base):
    """`first`: so many tokens stay exact, the attention sinks. `recent`: at least so many of the newest do, too, and so
    many are encoded together.

    A head's keys before RoPE are taken apart into their principal directions in a text, about their mean, largest
    first: a quarter of them have 4 bits, the next quarter 2, the others 1. Values are rotated by a Hadamard matrix over
    the largest power of two that divides a head's width, and have 2 bits. Codes mean the points that fit a normal
    distribution best, and each vector of a head has one scale (float16), by which it is off least: 2 + 16 / D bits.
    """

    first: int = option(4, least=0, most=64)
    recent: int = option(128, least=1, most=1024)
    key: ClassVar[str] = "kv-principal"
    error = 8.0  # of random weights, whose keys have no directions in common
    small: ClassVar[Mapping[str, Any]] = {"first": 2, "recent": 8}

    @property
    def storage(self) -> Storage:
        return Storage(block=self.recent, sinks=self.first, together=True, unrotated=True)

    def sizes(self, width: int, heads: int) -> Sizes:
        rows = (heads, width)
        return {"middle": rows, "size": rows, "basis": (heads, width, width)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """Of each head's keys the mean [G,D], the directions about it, as columns [G,D,D], and how large they are
        [G,D].
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

    def _transform(self, at: At) -> Transform:
        heads, width = map(int, at.constants["size"].shape)
        kind = Transform.falling if at.role == "k" else Transform.level
        return kind(heads, width, self.recent)

    def parts(self, at: At) -> Layout:
        return self._transform(at).parts()

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return self._transform(at).encode(_apart(at, x), _sizes(at))

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return _together(at, self._transform(at).decode(parts, _sizes(at)))

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """See `Transform.near`; but for rounding of the rotations."""
        want, got = (_apart(at, one) for one in (x, back))
        long = x.unflatten(-1, want.shape[-2:]).norm(dim=-1)
        if at.role == "k":
            long = long + at.constants["middle"].norm(dim=-1)
        near = self._transform(at).near(want, got, _sizes(at), 1e-4 * long + 1e-4)
        return near.all(-1)


def _measured(count: int, total: Tensor, squares: Tensor) -> dict[str, Tensor]:
    """The constants of a layer, of the sum [G,D] of the keys of so many tokens, and of their outer products [G,D,D]."""
    middle = total / count
    spread = squares / count - middle[..., None] * middle[..., None, :]
    size, basis = (x.flip(-1) for x in torch.linalg.eigh(spread))
    size = size.clamp(min=0).sqrt()
    least = (size[..., :1] * _FLAT).clamp(min=1e-6)
    return {
        "middle": middle.float(),
        "size": torch.maximum(size, least).float(),
        "basis": basis.float().contiguous(),
    }


def _sizes(at: At) -> Tensor:
    """How large the numbers are that `_apart` gives [G,D]."""
    size = at.constants["size"]
    return size if at.role == "k" else torch.ones_like(size)


def _power(size: int) -> int:
    """The largest power of two that divides it."""
    return size & -size


def _apart(at: At, x: Tensor) -> Tensor:
    """x [...,G D] -> [...,G,D] in the directions that are encoded."""
    basis = at.constants["basis"]
    apart = x.unflatten(-1, tuple(basis.shape[:2]))
    turned: Tensor
    if at.role == "k":
        turned = ((apart - at.constants["middle"])[..., None, :] @ basis).squeeze(-2)
    else:
        size = _power(int(basis.shape[1]))
        turned = rotated(apart, size) * size**-0.5
    return turned


def _together(at: At, x: Tensor) -> Tensor:
    """What is read, [B,G,T,D] in those directions, as it was: [B,1,T,G D]."""
    basis = at.constants["basis"]
    if at.role == "k":
        back = x @ basis.mT + at.constants["middle"][:, None]
    else:
        size = _power(int(basis.shape[1]))
        back = rotated(x, size) / size**0.5
    joined: Tensor = back.transpose(1, 2).flatten(2)[:, None]
    return joined
