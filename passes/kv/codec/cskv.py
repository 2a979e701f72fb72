"""CSKV (arXiv:2409.10593): keys and values of older tokens in fewer channels, of all heads together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.groups import block_sizes, group_dequantize, group_quantize, near
from accel.ir.tables import Rows, Tables
from accel.ir.tables import Sizes as TableSizes
from accel.passes.kv.codec import Base, Sizes
from accel.passes.kv.codec._principal import principal

_BITS = {"float32": 32, "float16": 16, "uint8": 8}


@dataclass(frozen=True)
class Cskv(Tables, Base):
    """`density`: of the G D numbers of a token's keys, before RoPE, and of its values, this share of features stays.
    `bits`: 32, or 4: then the features of keys are quantised in windows of `window` tokens of a feature, those of
    values per token. `window`: at least so many tokens stay exact, and so many are encoded together.

    The two maps, to features and back, are those that the paper's loss (squared error of keys and values of each
    layer) is least with: projections on the largest principal directions of a text's keys and values, without a step
    of training. The paper starts at an SVD of the weights and trains both.
    """

    density: float = option(0.2, above=0, most=1)
    bits: int = option(32, one_of=(4, 32))
    window: int = option(32, least=1, most=1024)
    lacks = "training of the maps from an SVD of the weights"
    key: ClassVar[str] = "cskv"
    together: ClassVar[bool] = True
    unrotated: ClassVar[bool] = True
    error = 8.0  # of random weights, whose channels have no common directions
    small: ClassVar[Mapping[str, Any]] = {"window": 8, "density": 0.5}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"density": 1.0, "window": 8},
        {"density": 0.5, "bits": 4},
    )

    @property
    def block(self) -> int:
        return self.window

    def sizes(self, width: int, heads: int) -> TableSizes:
        return {name: (heads * width, heads * width) for name in ("key_basis", "value_basis")}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """The principal directions [G D,G D] of all tokens' keys, and of their values, the largest first."""
        return {i: {n: x[0] for n, x in found.items()} for i, found in principal(rows).items()}

    def _features(self, width: int) -> int:
        return max(1, round(self.density * width))

    def _groups(self, role: str, count: int) -> tuple[int, str]:
        """Features with one scale: of a feature those of a window's tokens, or all of a token."""
        return (self.window, "rows") if role == "k" else (count, "channels")

    def parts(self, role: str, width: int, **_: Tensor) -> dict[str, tuple[str, Sizes]]:
        count = self._features(width)
        if self.bits == 32:
            return {"": ("float32", (self.window * count,))}
        codes, groups = block_sizes(self.window, count, self.bits, *self._groups(role, count))
        half = ("float16", (groups,))
        return {"": ("uint8", (codes,)), "scale": half, "least": half}

    def encode(
        self, role: str, x: Tensor, key_basis: Tensor, value_basis: Tensor
    ) -> dict[str, Tensor]:
        features = x @ self._basis(role, key_basis, value_basis)  # [B,1,P,R,f]
        features = features / x.shape[-1] ** 0.5  # no larger than x, for float16
        if self.bits == 32:
            return {"": features.flatten(-2)}
        groups = self._groups(role, int(features.shape[-1]))
        codes, scale, least = group_quantize(features, self.bits, *groups)
        return {"": codes, "scale": scale, "least": least}

    def decode(
        self,
        role: str,
        parts: dict[str, Tensor],
        width: int,
        key_basis: Tensor,
        value_basis: Tensor,
    ) -> Tensor:
        count = self._features(width)
        if self.bits == 32:
            features = parts[""].unflatten(-1, [self.window, count]).flatten(2, 3)
        else:
            groups = self._groups(role, count)
            features = group_dequantize(*parts.values(), self.bits, *groups, self.window, count)
        back: Tensor = features @ (self._basis(role, key_basis, value_basis) * width**0.5).mT
        return back

    def _basis(self, role: str, key_basis: Tensor, value_basis: Tensor) -> Tensor:
        """[G D,f]."""
        basis = key_basis if role == "k" else value_basis
        return basis[:, : self._features(int(basis.shape[0]))]

    def bits_of(self, role: str, width: int, **_: Tensor) -> float:
        found = self.parts(role, width).values()
        taken = sum(_BITS[dtype] * size for dtype, (size,) in found)
        return taken / (self.window * width)

    def within(
        self, role: str, x: Tensor, back: Tensor, key_basis: Tensor, value_basis: Tensor
    ) -> Tensor:
        """What is read lies in the directions that are stored; its features are those of x, or within half a step."""
        basis = self._basis(role, key_basis, value_basis)
        want, got = x @ basis, back @ basis
        off = 1e-4 * x.norm(dim=-1, keepdim=True).amax(-2, keepdim=True) + 1e-30
        right = (back - got @ basis.mT).norm(dim=-1, keepdim=True) <= off
        if self.bits == 32:
            same: Tensor = right & ((want - got).abs() <= off)
            return same
        got = got + (want - got).clamp(-off, off)
        steps = near(want, got, self.bits, *self._groups(role, int(basis.shape[1])))
        found: Tensor = right.flatten(3).all(-1) & steps.flatten(3).all(-1)  # [B,1,P]
        return found
