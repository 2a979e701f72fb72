"""The quantised cache of ONNX Runtime's GroupQueryAttention: whole multiples of scales that a text was measured for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.ops.codec import decode_static, encode_static, ends
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.trained import Parts

_BITS = (4, 8)  # that the operator has; one number for keys and values
_LEAST = 1e-30  # the largest number of a text at least, so that zeros have a scale too
_NAMES = {"k": "key", "v": "value"}


@dataclass(frozen=True)
class OrtGqaKv(Tables, Base):
    """`bits`: 8 or 4, of keys and values alike. `channels`: a scale for each channel of each head; without, one for all
    keys of a layer and one for all its values, which is read a little faster and loses more.

    A scale is the largest number of a text, divided by 127 (7 of 4 bits). A number is the nearest code times it, and
    beyond the range the nearest end. No row has a scale of its own, so nothing says that one held NaN.

    Keys are stored after RoPE, and each call reads its own keys and values as they are stored, so in prefill too.
    """

    bits: int = option(8, one_of=_BITS)
    channels: bool = True
    key: ClassVar[str] = "ort-gqa-kv"
    error = 8.0  # of random weights, where errors grow from layer to layer
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"channels": False},
        {"bits": 4},
        {"bits": 4, "channels": False},
    )

    def sizes(self, width: int, heads: int) -> Sizes:
        """The largest number of each channel."""
        return {f"{name}_most": (heads, width) for name in _NAMES.values()}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        most: dict[int, dict[str, Tensor]] = {}
        for row in rows:
            for layer, x in row.layers.items():
                seen = {"key_most": x.keys, "value_most": x.values}
                largest = {name: one.abs().amax((0, 2)) for name, one in seen.items()}  # [G,D]
                held = most.setdefault(layer, largest)
                most[layer] = {n: torch.maximum(held[n], one) for n, one in largest.items()}
        return most

    def constants(self, parts: Parts) -> Parts:
        """The scales: [G,D] by channel, else [1,1]."""
        steps = ends(self.bits)[1]
        return {
            layer: {
                f"{name}_scale": self._ranges(of[f"{name}_most"]) / steps
                for name in _NAMES.values()
            }
            for layer, of in parts.items()
        }

    def _ranges(self, most: Tensor) -> Tensor:
        return (most if self.channels else most.amax().reshape(1, 1)).clamp(min=_LEAST)

    @property
    def storage(self) -> Storage:
        return Storage(saturates=True)

    def parts(self, at: At) -> Layout:
        return {"": ("int8", (at.width,)) if self.bits == 8 else ("uint8", (-(-at.width // 2),))}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return {"": encode_static(x, _scale(at), self.bits)}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        decoded: Tensor = decode_static(parts[""], _scale(at), self.bits, at.width)
        return decoded

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than half a step, from the range's nearest end where it is beyond."""
        scale = _scale(at).unsqueeze(1)
        least, most = ends(self.bits)
        held = torch.minimum(torch.maximum(x, least * scale), most * scale)
        slack = scale * 0.5 + held.abs() * 1e-6
        return (back - held).abs() <= slack * (1 + 1e-4)


def _scale(at: At) -> Tensor:
    return at.constants[f"{_NAMES[at.role]}_scale"]
