"""ggml's blocks of numbers of a table times a scale, as codes: all of their numbers are whole ones times a scale.

The package gguf makes floats of them; divided by their scales these are the codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accel.compiler.load.gguf._forms import Form, Scales, float16, half, split
from accel.ir.codes import Levels


def _grid(
    kind: str,
    size: int,
    bits: int,
    group: int,
    scales: Callable[[Tensor], Scales],
    zero: int | None = None,
) -> Form:
    """Blocks whose numbers are whole ones. scales: bytes [N,B,size] -> [N,B,·]; zero: the code of 0, if it is not the
    middle one.
    """
    zero = 2 ** (bits - 1) if zero is None else zero

    def read(blocks: Tensor) -> tuple[Tensor, Scales]:
        from gguf import GGMLQuantizationType, quants

        raw = blocks.flatten(1).contiguous().numpy()
        floats = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
        found = scales(blocks)
        whole = found.coarse.float() * found.fine.float() if isinstance(found, Levels) else found
        numbers = floats.view(*whole.shape, group) / whole.unsqueeze(-1)
        codes = numbers.nan_to_num(0, 0, 0).round() + zero  # a scale may be 0
        return codes.to(torch.uint8).flatten(2), found

    return Form(size, bits, group, zero, read)


def _iq4_xs(b: Tensor) -> Levels:
    """6 bits for each 32 numbers: 4 of them, and then 2 of all."""
    high = split(b[..., 2:4], 1, 2)
    low = split(b[..., 4:8], 1, 4)
    return Levels(float16(b[..., :2]), (low | high << 4).to(torch.int8) - 32)


def _mxfp4(b: Tensor) -> Tensor:
    """Halves of powers of two, by their exponents."""
    return torch.pow(2.0, b[..., :1].double() - 128).float()


def _nvfp4(b: Tensor) -> Tensor:
    """Halves of floats of 4 bits of exponent and 3 of mantissa, of which 127 is 0 too."""
    bits = b[..., :4]
    numbers = bits.where(bits != 127, 0).view(torch.float8_e4m3fn)
    return numbers.float() / 2


def _odd(b: Tensor, four: Tensor, factor: float) -> Tensor:
    """A half float [N,B,2] times 1/2 and a number of 4 bits [N,B,·], times a factor."""
    return half(b) * (four + 0.5) * factor


def _iq2_xxs(b: Tensor) -> Tensor:
    return _odd(b[..., :2], b[..., 2:].unflatten(2, (-1, 8))[..., 7] >> 4, 0.25)


def _iq2_xs(b: Tensor) -> Tensor:
    return _odd(b[..., :2], split(b[..., 66:], 1, 4), 0.25)


def _iq2_s(b: Tensor) -> Tensor:
    return _odd(b[..., :2], split(b[..., 74:], 1, 4), 0.25)


def _iq3_xxs(b: Tensor) -> Tensor:
    return _odd(b[..., :2], b[..., 66:].unflatten(2, (-1, 4))[..., 3] >> 4, 0.5)


def _iq3_s(b: Tensor) -> Tensor:
    return half(b[..., :2]) * (1 + 2 * split(b[..., 106:], 1, 4))


def _iq1_s(b: Tensor) -> Tensor:
    """Eighths: the numbers are -1, 0 and 1, and an eighth more or less."""
    three = b[..., 34:].unflatten(2, (-1, 2))[..., 1] >> 4 & 7
    found: Tensor = half(b[..., :2]) * (2 * three + 1) / 8
    return found


def _iq1_m(b: Tensor) -> Tensor:
    """The same; the half float lies in the highest 4 bits of four numbers of 16 bits, which hold 3 bits of 4 scales."""
    low, high = b[..., 48:].unflatten(2, (4, 2)).int().unbind(-1)
    words = low | high << 8
    parts = words >> 12 << torch.arange(0, 16, 4, dtype=torch.int32)
    factor = parts.sum(-1, keepdim=True).to(torch.int16).view(torch.float16).float()
    three = words.unsqueeze(-1) >> torch.arange(0, 12, 3, dtype=torch.int32) & 7
    found: Tensor = factor * (2 * three.flatten(2) + 1) / 8
    return found


GRIDS = {
    "IQ4_NL": _grid("IQ4_NL", 18, 8, 32, lambda b: half(b[..., :2])),
    "IQ4_XS": _grid("IQ4_XS", 136, 8, 32, _iq4_xs),
    "MXFP4": _grid("MXFP4", 17, 5, 32, _mxfp4),
    "NVFP4": _grid("NVFP4", 36, 5, 16, _nvfp4),
    "IQ2_XXS": _grid("IQ2_XXS", 66, 8, 32, _iq2_xxs),
    "IQ2_XS": _grid("IQ2_XS", 74, 8, 16, _iq2_xs),
    "IQ2_S": _grid("IQ2_S", 82, 8, 16, _iq2_s),
    "IQ3_XXS": _grid("IQ3_XXS", 98, 8, 32, _iq3_xxs),
    "IQ3_S": _grid("IQ3_S", 110, 5, 32, _iq3_s),
    "IQ1_S": _grid("IQ1_S", 50, 5, 32, _iq1_s),
    "IQ1_M": _grid("IQ1_M", 56, 5, 16, _iq1_m),
    "TQ1_0": _grid("TQ1_0", 54, 2, 256, lambda b: half(b[..., 52:]), zero=1),
    "TQ2_0": _grid("TQ2_0", 66, 2, 256, lambda b: half(b[..., 64:]), zero=1),
}
