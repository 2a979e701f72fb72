"""QAQ (arXiv:2403.04643): each token's key and value have as few bits as the error allows that attention can bear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant
from accel.ir.ops.groups import block_sizes, group_dequantize, group_quantize
from accel.passes.kv.inputs import relied
from accel.passes.kv.inputs.attends import Attends
from accel.passes.kv.keep import Base, Parts, Tier

_BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class QAQ(Base):
    """`error`: how far attention's outcome may be off, ε. Of n tokens, a key may be off by
    (12/|q|² · ln(n³/(n-1) ε² + 1))^½, |q|² of the last `window` queries, a mean, and a value by (12/n)^½ ε / a,
    a: the most attention that one of these queries paid to it. From `least_bits` to `most_bits` (1, 2, 4 or 8), the
    fewest are taken with which rounding keeps within this; the last `window` - 1 tokens have the most. `outliers`: the
    share of a vector's numbers that stay float16 with their places, half of it the largest and half the smallest.

    The paper also has 3 bits: with them there are nine encodings of 2 to 4 bits, each as long as its head with the most
    tokens, and on SmolLM2 they took 2 % more memory than four. Its 0 bits never come up, but where all numbers are one.
    For |q|² its release has 300, called the norm of queries: an error of a key grows with |q| in a product, and |q| is
    about 15 in trained models.

    Each pair of bits, such as `k2v4`, is an encoding of its own, which costs each step a decode: four with 2 to 4
    bits, nine to 8. A token and head of D channels takes bits · D/8 bytes for each of key and value, 4 for steps, 3
    for each outlier, and 8 for its position.
    """

    error: float = option(1.0, above=0)
    window: int = option(5, least=1, most=1024)
    least_bits: int = option(2, one_of=_BITS)
    most_bits: int = option(4, one_of=_BITS)
    outliers: float = option(0.01, least=0, below=1)
    lacks = "codes of 3 bits (with them nine forms take more memory than four on SmolLM2)"
    merges: ClassVar[bool] = False
    demotes: ClassVar[bool] = True
    small: ClassVar[Mapping[str, Any]] = {"window": 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_bits > self.most_bits:
            raise RecipeError(
                f"{self.full_name}: least_bits is {self.least_bits}, more than most_bits, {self.most_bits}; give less"
            )

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def relies(self) -> frozenset[Invariant]:
        return relied(["queries"])[0]

    @property
    def breaks(self) -> frozenset[Invariant]:  # type: ignore[override]
        return Base.breaks | {Invariant.PLAIN_KEYS}

    @property
    def levels(self) -> tuple[int, ...]:
        """The bits that a vector may have."""
        return tuple(b for b in _BITS if self.least_bits <= b <= self.most_bits)

    @property
    def tiers(self) -> Mapping[str, Tier]:
        return {f"k{k}v{v}": Within(k, v, self.outliers) for k in self.levels for v in self.levels}

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))

    def allowed(
        self,
        queries: Tensor,
        query_positions: Tensor,
        keys: Tensor,
        seen: Tensor,
        attends: Attends,
    ) -> tuple[Tensor, Tensor]:
        """How far each key [B,G,1] and value [B,G,S] may be off."""
        queries, query_positions = (
            queries[:, :, -self.window :],
            query_positions[:, -self.window :],
        )
        groups, real = keys.shape[1], (query_positions >= 0)[:, None]  # [B,1,W]
        squares = queries.float().square().sum(3) * real
        means = squares.sum(2) / real.sum(2).clamp(min=1)  # [B,H]
        norm = means.unflatten(1, (groups, -1)).amax(2).clamp(min=1e-6)[..., None]
        n = seen.clamp(min=2).float()[:, None, None]
        key = (12 / norm * (n * n * (n / (n - 1)) * self.error**2 + 1).log()).sqrt()
        most = attends(queries, query_positions).amax((2, 3))
        return key, (12 / n).sqrt() * self.error / most.clamp(min=1e-9)

    def tier(
        self,
        queries: Tensor,
        query_positions: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        seen: Tensor,
        attends: Attends,
    ) -> Tensor:
        """See Base: by the bits of the key, then of the value."""
        asked = queries, query_positions, keys, seen, attends
        late = positions > (seen - self.window)[:, None, None]
        found = torch.zeros_like(positions)
        for x, allowed in zip((keys, values), self.allowed(*asked), strict=True):
            low, high = _span(x, self.outliers)
            needs = (high - low) / (2 * allowed) + 1  # 2^bits, at least
            level = torch.zeros_like(positions)
            for bits in self.levels[:-1]:
                level = level + (~(needs <= 2**bits) | late).long()
            found = found * len(self.levels) + level
        return found


@dataclass(frozen=True)
class Within(Tier):
    """Each vector in steps of its own, `key_bits` and `value_bits` a number, and the share `outliers` as it is."""

    key_bits: int
    value_bits: int
    outliers: float

    def _bits(self, role: str) -> int:
        return self.key_bits if role == "k" else self.value_bits

    def parts(self, role: str, width: int) -> Parts:
        codes, _ = block_sizes(1, width, self._bits(role), width, "channels")
        found: Parts = {
            "": ("uint8", codes),
            "scale": ("float16", 1),
            "least": ("float16", 1),
        }
        if ends := _ends(self.outliers, width):
            found["outlier"] = ("float16", 2 * ends)
            found["place"] = ("uint8" if width <= 256 else "int64", 2 * ends)
        return found

    def encode(self, x: Tensor, joins: Tensor, role: str) -> dict[str, Tensor]:
        x, width = torch.where(joins[..., None], x, 0), int(x.shape[3])
        parts, ends = dict[str, Tensor](), _ends(self.outliers, width)
        if ends:
            order = x.sort(dim=3, stable=True).indices
            place = torch.cat((order[..., :ends], order[..., width - ends :]), dim=3)
            parts["outlier"] = x.gather(3, place).half()
            parts["place"] = place.to(torch.uint8 if width <= 256 else torch.int64)
            low, high = (x.gather(3, order.narrow(3, i, 1)) for i in (ends, width - 1 - ends))
            x = torch.minimum(torch.maximum(x, low), high)
        found = group_quantize(x.unsqueeze(3), self._bits(role), width, "channels")
        return dict(zip(("", "scale", "least"), found, strict=True)) | parts

    def decode(self, parts: dict[str, Tensor], width: int, role: str) -> Tensor:
        steps = parts[""], parts["scale"], parts["least"]
        found: Tensor = group_dequantize(*steps, self._bits(role), width, "channels", 1, width)
        if "outlier" in parts:
            found = found.scatter(3, parts["place"].long(), parts["outlier"].float())
        return found


def _ends(outliers: float, width: int) -> int:
    """How many numbers at either end of a vector are outliers."""
    return min(math.ceil(outliers / 2 * width), (width - 1) // 2)


def _span(x: Tensor, outliers: float) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number [...] of each vector [...,D], but for outliers."""
    if not (ends := _ends(outliers, int(x.shape[-1]))):
        return x.amin(-1), x.amax(-1)
    order = x.sort(dim=-1).values
    return order[..., ends], order[..., int(x.shape[-1]) - 1 - ends]
