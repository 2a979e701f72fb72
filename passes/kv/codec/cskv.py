"""CSKV (arXiv:2409.10593): keys and values of older tokens in fewer channels, of all heads together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._groups import Groups
from accel.passes.kv.codec._principal import basis_of, principal


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
    error = 8.0  # of random weights, whose channels have no common directions
    small: ClassVar[Mapping[str, Any]] = {"window": 8, "density": 0.5}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"density": 1.0, "window": 8},
        {"density": 0.5, "bits": 4},
    )

    @property
    def storage(self) -> Storage:
        return Storage(block=self.window, together=True, unrotated=True)

    def sizes(self, width: int, heads: int) -> Sizes:
        return {name: (heads * width, heads * width) for name in ("key_basis", "value_basis")}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """The principal directions [G D,G D] of all tokens' keys, and of their values, the largest first."""
        return {i: {n: x[0] for n, x in found.items()} for i, found in principal(rows).items()}

    def _features(self, width: int) -> int:
        return max(1, round(self.density * width))

    def _groups(self, at: At) -> Groups:
        """Features with one scale: of a feature those of a window's tokens, or all of a token."""
        if at.role == "k":
            return Groups(self.bits, self.window, "rows", self.window)
        return Groups(self.bits, self._features(at.width), "channels", self.window)

    def parts(self, at: At) -> Layout:
        count = self._features(at.width)
        if self.bits == 32:
            return {"": ("float32", (self.window * count,))}
        return self._groups(at).parts(count)

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        features = x @ self._basis(at)  # [B,1,P,R,f]
        features = features / at.width**0.5  # no larger than x, for float16
        if self.bits == 32:
            return {"": features.flatten(-2)}
        return self._groups(at).encode(features)

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        count = self._features(at.width)
        if self.bits == 32:
            features = parts[""].unflatten(-1, [self.window, count]).flatten(2, 3)
        else:
            features = self._groups(at).decode(parts, count)
        back: Tensor = features @ (self._basis(at) * at.width**0.5).mT
        return back

    def _basis(self, at: At) -> Tensor:
        """[G D,f]."""
        return basis_of(at)[:, : self._features(at.width)]

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What is read lies in the directions that are stored; its features are those of x, or within half a step."""
        basis = self._basis(at)
        want, got = x @ basis, back @ basis
        off = 1e-4 * x.norm(dim=-1, keepdim=True).amax(-2, keepdim=True) + 1e-30
        right = (back - got @ basis.mT).norm(dim=-1, keepdim=True) <= off
        if self.bits == 32:
            same: Tensor = right & ((want - got).abs() <= off)
            return same
        got = got + (want - got).clamp(-off, off)
        steps = self._groups(at).near(want, got)
        found: Tensor = right.flatten(3).all(-1) & steps.flatten(3).all(-1)  # [B,1,P]
        return found
