"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from accel.ir.ops.codec import LEVELS, decode_rows, encode_rows
from accel.passes.kv.codec import At, Base, Layout


@dataclass(frozen=True)
class Template(Base):
    """The parts of a slot: here, int8 numbers and one scale."""

    error = 0.5  # of random weights, where errors grow from layer to layer

    def parts(self, at: At) -> Layout:
        return {"": ("int8", (at.width,)), "scale": ("float32", ())}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        q, scale = encode_rows(x)
        return {"": q, "scale": scale}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        decoded: Tensor = decode_rows(parts[""], parts["scale"])
        return decoded

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        half = x.abs().amax(-1, keepdim=True) / (2 * LEVELS)
        return (back - x).abs() <= half * (1 + 1e-4)
