"""MiKV (arXiv:2402.18096): no eviction; tokens that are not kept are quantised, at their positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.ops.groups import block_sizes, group_dequantize, group_quantize
from accel.passes.kv.keep import Base, Parts


@dataclass(frozen=True)
class MiKV(Base):
    """`bits`: 2, 4 or 8, per token; each half of a head's channels has its own scale and minimum. The paper also
    scales channels of keys before, by a prompt's largest queries and keys in them; that is left out.
    """

    bits: int = option(4, one_of=(2, 4, 8))
    lacks = "channel scales of keys by a prompt's queries"
    breaks = Base.breaks | {Invariant.PLAIN_KEYS}
    merges: ClassVar[bool] = False
    demotes: ClassVar[bool] = True

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))

    def parts(self, width: int) -> Parts:
        codes, groups = block_sizes(1, width, self.bits, _half(width), "channels")
        return {"": ("uint8", codes), "scale": ("float16", groups), "least": ("float16", groups)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        found = group_quantize(x.unsqueeze(3), self.bits, _half(int(x.shape[3])), "channels")
        return dict(zip(("", "scale", "least"), found, strict=True))

    def decode(self, parts: dict[str, Tensor], width: int) -> Tensor:
        decoded: Tensor = group_dequantize(
            *parts.values(), self.bits, _half(width), "channels", 1, width
        )
        return decoded


def _half(width: int) -> int:
    return max(1, -(-width // 2))
