"""Keys and values as the model computes them: what a cache is without a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from accel.passes import Pass
from accel.passes.kv.codec import At, Base, Layout


@dataclass(frozen=True)
class KvFloat32(Base):
    """Keeps the cache exact under weights whose recipe stores it in half precision."""

    grade = "lossless"

    def steps(self) -> Sequence[Pass]:
        return ()

    def parts(self, at: At) -> Layout:
        return {"": ("float32", (at.width,))}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return {"": x}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""]

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """Every number is read as it was stored."""
        return back == x
