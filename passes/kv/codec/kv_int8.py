"""8-bit KV cache: int8 keys and values with a scale per token and head, a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from accel.ir.ops.codec import LEVELS, decode_rows, encode_rows
from accel.passes.kv.codec import At, Base, Layout


@dataclass(frozen=True)
class KvInt8(Base):
    """Symmetric int8 with one float32 scale per token and head (maximum / 127); no calibration.

    Before and after: `tests/passes/texts/kv_int8.before.txt`, `kv_int8.after.txt`.
    """

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
        """No number is off by more than half a step of its row."""
        half = x.abs().amax(-1, keepdim=True) / (2 * LEVELS)
        return (back - x).abs() <= half * (1 + 1e-4)
