"""Half-precision KV cache: keys and values as float16, half of the bytes, at hardly any loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.ops.codec import MOST_HALF, decode_halves, encode_halves
from accel.passes.kv.codec import At, Base, Layout


@dataclass(frozen=True)
class KvFloat16(Base):
    """The nearest float16 (IEEE 754 binary16) of each number: 11 bits of precision, no scale, no calibration. What is
    beyond 65504, as a massive activation may be in values or in keys without a norm, is stored as 65504.
    """

    error = 0.01  # of random weights, where errors grow from layer to layer

    def parts(self, at: At) -> Layout:
        return {"": ("float16", (at.width,))}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return {"": encode_halves(x)}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        decoded: Tensor = decode_halves(parts[""])
        return decoded

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than half a step of float16, which is 2^-11 of it, or of the smallest ones 2^-25."""
        x = x.clamp(-MOST_HALF, MOST_HALF)
        off = torch.maximum(x.abs() * 2.0**-11, x.new_full((), 2.0**-25))
        return (back - x).abs() <= off * (1 + 1e-4)
