"""Groups of numbers in steps of their own, as several codecs store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from accel.ir.ops.groups import block_sizes, group_dequantize, group_quantize, near
from accel.passes.kv.codec._method import Layout


@dataclass(frozen=True)
class Groups:
    """Blocks of `rows` tokens in codes of `bits` bits, with a scale and a minimum (float16) of each `size` numbers:
    tokens of a channel (`along` "rows"), or channels of a token ("channels").
    """

    bits: int
    size: int
    along: str
    rows: int = 1

    @classmethod
    def by_role(cls, role: str, bits: int, size: int, rows: int) -> Self:
        """As KIVI has them: keys in groups of tokens of a channel, values in groups of channels of a token."""
        return cls(bits, size, "rows" if role == "k" else "channels", rows)

    def parts(self, width: int) -> Layout:
        """Of a block of tokens of D = `width` numbers."""
        codes, groups = block_sizes(self.rows, width, self.bits, self.size, self.along)
        half = ("float16", (groups,))
        return {"": ("uint8", (codes,)), "scale": half, "least": half}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Blocks [..,P,R,D] -> their parts [..,P,n]."""
        codes, scale, least = group_quantize(x, self.bits, self.size, self.along)
        return {"": codes, "scale": scale, "least": least}

    def decode(
        self, parts: Mapping[str, Tensor], width: int, finer: Tensor | None = None
    ) -> Tensor:
        """Parts [..,P,n] -> float32 [..,P R,D]. finer: codes of what a number is off."""
        codes, scale, least = (parts[name] for name in ("", "scale", "least"))
        more = () if finer is None else (finer,)
        found: Tensor = group_dequantize(
            codes, scale, least, self.bits, self.size, self.along, self.rows, width, *more
        )
        return found

    def blocks(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        """The same, [B,G,P,R,D]."""
        found: Tensor = self.decode(parts, width).unflatten(2, (-1, self.rows))
        return found

    def near(self, x: Tensor, back: Tensor) -> Tensor:
        """Whether a number is off by no more than half a step of its group, but for the ends, which are float16."""
        return near(x, back, self.bits, self.size, self.along)
