"""8-bit floats (E4M3FN) as a KV cache: the precision of a number goes with the number, not with its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.ops.codec import look_up_rows
from accel.passes.kv.codec import At, Base, Layout

MOST = 448.0  # of E4M3FN
_NAN = 127
_LEAST = 1e-30  # the largest number of a row at least, so that a row of zeros has a scale too


@dataclass(frozen=True)
class KvFp8(Base):
    """A sign, 4 bits of exponent, 3 of mantissa. `scaled`: a float32 scale for each token and head, so that its largest
    number is 448; without, the scale is 1, as in vLLM without calibration: numbers beyond 448 become 448.

    The bytes are those of torch's float8_e4m3fn, in uint8, which every target can store: they are made by comparisons
    and multiplications by powers of two, which are exact, and read by a table.
    """

    scaled: bool = True
    error = 1.0  # of random weights, where errors grow from layer to layer
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"scaled": False},)

    def parts(self, at: At) -> Layout:
        codes = ("uint8", (at.width,))
        return {"": codes, "scale": ("float32", ())} if self.scaled else {"": codes}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        broken = x * 0  # NaN, where a number is none
        if not self.scaled:
            return {"": _codes(x, broken)}
        scale = x.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / MOST
        broken = broken.sum(-1, keepdim=True)
        return {"": _codes(x / scale, broken), "scale": (scale + broken).squeeze(-1)}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        codes = parts[""]
        numbers: Tensor = look_up_rows(codes, _numbers(codes.device), parts.get("scale"))
        return numbers

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """No number is off by more than a sixteenth of it, or half a step of the smallest ones."""
        if self.scaled:
            scale = x.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / MOST
        else:
            scale, x = x.new_ones(()), x.clamp(-MOST, MOST)
        off = torch.maximum(x.abs() / 16, scale / 1024)
        return (back - x).abs() <= off * (1 + 1e-4)


def _codes(x: Tensor, broken: Tensor) -> Tensor:
    """uint8 of each number; NaN where `broken` is."""
    left = x.abs().clamp(max=MOST) * 64  # in units of the smallest number of full precision
    exponent = torch.zeros_like(x)
    for power in (8, 4, 2, 1):
        over = left >= 2.0**power
        left = torch.where(over, left * 2.0**-power, left)
        exponent = torch.where(over, exponent + power, exponent)
    # What rounds up to 16 eighths is the next exponent's first code, which is also the next number.
    codes = (left * 8).round() + exponent * 8 + torch.where(x < 0, 128.0, 0.0)
    return torch.where(broken.isnan(), float(_NAN), codes).to(torch.uint8)


def _numbers(device: torch.device) -> Tensor:
    """What each of the 256 bytes means [256]."""
    code = torch.arange(128, device=device)
    exponent, eighths = code // 8, (code % 8).float()
    whole = torch.where(exponent > 0, 8 + eighths, eighths)
    found = whole * 2.0 ** (exponent.clamp(min=1) - 10).float()
    found = torch.where(code == _NAN, torch.nan, found)
    return torch.cat((found, -found))
