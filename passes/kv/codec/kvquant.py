"""KVQuant (arXiv:2401.18079): codes that mean points learnt from a text, keys by channel before RoPE, and the few
numbers that fit none as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.ir.axis import option
from accel.ir.ops.codec import look_up_rows
from accel.ir.ops.groups import group_dequantize
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage

_BITS = {2: (2,), 3: (2, 1), 4: (4,)}  # of a code -> bits of it that lie together in bytes
_SHARE = 0.01  # of a text's numbers that its ranges leave out
_TOKENS = 4096  # of a text that ranges and points go by, of each layer
_STEPS = 50  # of k-means
_LEAST = 2.0**-24  # half a range at least: of float16 the smallest number


@dataclass(frozen=True)
class Kvquant(Tables, Base):
    """`bits`: 2, 3 or 4. `outliers`: this share of a token's G D numbers, half of them the largest and half the
    smallest (of keys: beside their channels' ranges), is float16, with its places. `first`: so many tokens stay exact.
    `recent`: at least so many of the newest do, too, and so many are encoded together.

    Keys are taken before RoPE, in the range that 99 % of the numbers of their channel have in a text; values in that
    of their token, less its outliers. 2^bits points between -1 and 1, of each layer's keys and of its values, are the
    means that k-means finds in the text. The paper weights that by the squared gradients of the loss; here all numbers
    count alike, since a compiled program has no gradients. Its Q-Norm is left out.
    """

    bits: int = option(3, one_of=_BITS)
    outliers: float = option(_SHARE, above=0, most=1)
    first: int = option(1, least=0, most=64)
    recent: int = option(32, least=1, most=1024)
    lacks = "codes weighted by the gradients of a loss; Q-Norm"
    key: ClassVar[str] = "kvquant"
    error = 8.0  # of random weights, where errors grow from layer to layer
    small: ClassVar[Mapping[str, Any]] = {"recent": 8}
    others: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"bits": 4, "outliers": 0.1, "recent": 8},
        {"bits": 2, "outliers": 1.0, "first": 0, "recent": 8},
    )

    @property
    def storage(self) -> Storage:
        return Storage(block=self.recent, sinks=self.first, together=True, unrotated=True)

    # What a text says

    def sizes(self, width: int, heads: int) -> Sizes:
        """The middle and half the range of each channel of keys; the points of 2, 3 and 4 bits, one after another."""
        points = sum(2**bits for bits in _BITS)
        ranges = {"key_middle": (heads, width), "key_half": (heads, width)}
        return {**ranges, "key_points": (points,), "value_points": (points,)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for row in rows:
            for layer, x in row.layers.items():
                held = seen.setdefault(layer, [])
                room = _TOKENS - sum(len(keys) for keys, _ in held)
                keys = x.keys if x.unrotated is None else x.unrotated
                flat = [one.transpose(1, 2).flatten(0, 1)[:room] for one in (keys, x.values)]
                held.append((flat[0].half(), flat[1].half()))  # [T,G,D]
        return {
            layer: _measured(*(torch.cat(one).float() for one in zip(*held, strict=True)))
            for layer, held in seen.items()
        }

    # What is stored

    def _each_side(self, width: int) -> int:
        """Outliers of a token on either side of its range."""
        return math.ceil(self.outliers * width / 2 - 1e-9)

    def parts(self, at: At) -> Layout:
        codes = sum(-(-at.width * bits // 8) for bits in _BITS[self.bits])
        count = 2 * self._each_side(at.width)
        found: Layout = {
            "": ("uint8", (self.recent * codes,)),
            "outliers": ("float16", (self.recent * count,)),
            "places": ("uint8", (self.recent * count * _place_bytes(at.width),)),
        }
        if at.role == "v":
            found |= {name: ("float16", (self.recent,)) for name in ("middle", "half")}
        return found

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        broken = (x.half().float() * 0).sum(
            -1, keepdim=True
        )  # NaN, where float16 has no such number
        x = torch.where(broken.isnan(), 0.0, x)
        if at.role == "k":
            middle, half = _ranges(at)
            size = (x - middle) / half
        else:
            size = x
        side = self._each_side(at.width)
        above, below = size.topk(side, -1), size.topk(side, -1, largest=False)
        places = torch.cat((above.indices, below.indices), -1)
        found = {}
        if at.role == "v":
            middle, half = self._range(x)
            size = (x - middle) / half.float().clamp(min=_LEAST)
            found = {"middle": middle.half().squeeze(-1), "half": half.squeeze(-1)}
        points = self._points(at)
        edges = (points[1:] + points[:-1]) / 2
        codes = (size[..., None] > edges).sum(-1)
        lower = [places % 256, places // 256][: _place_bytes(at.width)]
        return {
            "": _packed(codes, self.bits).flatten(-2),
            "outliers": (x.gather(-1, places) + broken).half().flatten(-2),
            "places": torch.cat(lower, -1).to(torch.uint8).flatten(-2),
            **found,
        }

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        rows = {name: x.unflatten(-1, (self.recent, -1)).flatten(2, 3) for name, x in parts.items()}
        if at.role == "k":
            middle, half = _ranges(at)
        else:
            middle, half = rows["middle"].float(), rows["half"].float().clamp(min=_LEAST)
        codes = _unpacked(rows[""], self.bits, at.width)
        x = look_up_rows(codes, self._points(at)) * half + middle
        outliers = rows["outliers"].float()
        places, *high = rows["places"].long().chunk(_place_bytes(at.width), -1)
        for more in high:
            places = places + 256 * more
        broken = (outliers * 0).sum(-1, keepdim=True)
        back: Tensor = x.scatter(-1, places, outliers) + broken
        return back

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The middle, and half of the range, of what is no outlier of a token: [...,1], as they are stored."""
        width = int(x.shape[-1])
        at = min(self._each_side(width), (width - 1) // 2)
        most = x.topk(at + 1, -1).values[..., -1:]
        least = x.topk(at + 1, -1, largest=False).values[..., -1:]
        middle = (most / 2 + least / 2).half().float()
        return middle, torch.maximum(most - middle, middle - least).half()

    def _points(self, at: At) -> Tensor:
        """[2^bits]."""
        points = at.constants["key_points" if at.role == "k" else "value_points"]
        return points[2**self.bits - 4 : 2 ** (self.bits + 1) - 4]

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """A number is float16, or no point is nearer than the one that it is read as; and of each token so many are the
        former as there are outliers.
        """
        if at.role == "k":
            middle, half = _ranges(at)
        else:
            middle, half = self._range(x)
            half = half.float().clamp(min=_LEAST)
        off = (back - x).abs()
        rounded = off <= x.abs() * 2**-10 + 1e-7
        nearest = torch.full_like(x, torch.inf)
        for point in self._points(at):
            nearest = torch.minimum(nearest, (middle + half * point - x).abs())
        slack = (x.abs() + half) * 1e-5 + 1e-7
        many = rounded.sum(-1, keepdim=True) >= min(2 * self._each_side(at.width), at.width)
        return (rounded | (off <= nearest + slack)) & many


def _ranges(at: At) -> tuple[Tensor, Tensor]:
    """The middle and half the range of each channel of keys [G D]."""
    return at.constants["key_middle"].flatten(), at.constants["key_half"].flatten()


def _place_bytes(width: int) -> int:
    """Of the place of an outlier."""
    return 1 if width <= 256 else 2


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [...,W] -> bytes [...,n], uint8."""
    found = []
    for own in _BITS[bits]:
        per = 8 // own
        apart = pad(codes % 2**own, (0, -int(codes.shape[-1]) % per)).unflatten(-1, (per, -1))
        powers = 2 ** (own * torch.arange(per, device=codes.device))
        found.append((apart * powers[:, None]).sum(-2))
        codes = codes // 2**own
    return torch.cat(found, -1).to(torch.uint8)


def _unpacked(packed: Tensor, bits: int, width: int) -> Tensor:
    """What `_packed` made of codes [B,1,T,W], uint8: rows whose steps are powers of two, from 0 on."""
    own = _BITS[bits]
    parts = packed.split([-(-width * n // 8) for n in own], -1)
    step, found = torch.ones_like(packed[..., :1], dtype=torch.float16), list[Tensor]()
    for part, n in zip(parts, own, strict=True):
        found.append(group_dequantize(part, step, step * 0, n, width, "channels", 1, width))
        step = step * 2**n
    first, *more = found
    return sum(more, first).to(torch.uint8)


def _measured(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Of the keys and values of a layer, [T,G,D]."""
    most, least = (_quantile(keys, q) for q in (1 - _SHARE / 2, _SHARE / 2))
    middle, half = (most + least) / 2, ((most - least) / 2).clamp(min=_LEAST)
    sizes = (keys - middle) / half
    tokens = values.flatten(1).T  # quantiles of each token
    top, bottom = (_quantile(tokens, q) for q in (1 - _SHARE / 2, _SHARE / 2))
    of_values = (tokens - (top + bottom) / 2) / ((top - bottom) / 2).clamp(min=_LEAST)
    return {
        "key_middle": middle,
        "key_half": half,
        "key_points": _all_points(sizes[sizes.abs() <= 1]),
        "value_points": _all_points(of_values[of_values.abs() <= 1]),
    }


def _quantile(x: Tensor, share: float) -> Tensor:
    """Along axis 0."""
    return x.sort(0).values[round(share * (len(x) - 1))]


def _all_points(x: Tensor) -> Tensor:
    """Those of 2, 3 and 4 bits [28]."""
    ordered = x.flatten().double().sort().values
    return torch.cat([_means(ordered, 2**bits) for bits in _BITS]).float()


def _means(x: Tensor, count: int) -> Tensor:
    """The points [count] of k-means over sorted numbers x."""
    sums = pad(x.cumsum(0), (1, 0))
    at = (2 * torch.arange(count) + 1) * len(x) // (2 * count)
    points = x[at.clamp(max=len(x) - 1)] if len(x) else torch.linspace(-1, 1, count).double()
    for _ in range(_STEPS):
        inner = torch.searchsorted(x, (points[1:] + points[:-1]) / 2, right=True)
        ends = torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), len(x))))
        many = ends.diff()
        points = torch.where(many > 0, sums[ends].diff() / many.clamp(min=1), points)
    return points
