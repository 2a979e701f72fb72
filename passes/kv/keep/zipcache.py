"""ZipCache (arXiv:2405.14256): salient tokens are quantised to 4 bits, the others to 2, and scales are separated by
channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.ops.groups import LEAST, WIDER, block_sizes, group_dequantize, group_quantize, packed
from accel.passes.kv._shared.slots import ranks_of
from accel.passes.kv.keep import Base, Parts, Tier

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class ZipCache(Base):
    """Of the tokens of a head that go at one eviction, the share `ratio` with the lowest scores has `low_bits` bits a
    number; the others are salient, and have `bits`.

    Keys have a scale and a minimum of each channel, over the salient tokens of one eviction or over the others. Values
    are divided by the square root of each channel's largest magnitude, then have a scale and a minimum of each token
    (the paper's: of all heads of a token, which here may be in different forms). Nothing is encoded twice.

    A token and head of D channels takes bits · D/8 bytes of keys and 4 more of values, and 11 for its position and
    eviction; the steps of one eviction take 6 D for each number of bits.
    """

    ratio: float = option(0.4, least=0, most=1)
    bits: int = option(4, one_of=_BITS)
    low_bits: int = option(2, one_of=_BITS)
    breaks = Base.breaks | {Invariant.PLAIN_KEYS}
    merges: ClassVar[bool] = False
    demotes: ClassVar[bool] = True

    def __call__(self, values: Tensor, chosen: Tensor) -> Tensor:
        return values.gather(2, chosen[..., None].expand(-1, -1, -1, values.shape[3]))

    @property
    def tiers(self) -> Mapping[str, Tier]:
        return {"salient": Separated(self.bits), "rest": Separated(self.low_bits)}

    def counts(self, gone: int) -> tuple[int, ...]:
        """See Base."""
        rest = int(gone * self.ratio)
        return gone - rest, rest

    def tier(self, gone: Tensor, scores: Tensor) -> Tensor:
        """See Base."""
        rank = ranks_of(scores.masked_fill(~gone, -torch.inf))
        count = gone.sum(2, keepdim=True)
        rest = (count * self.ratio).floor().long()
        return (rank >= count - rest).long()


@dataclass(frozen=True)
class Separated(Tier):
    """So many `bits` a number, in steps of a channel (keys), or of a token whose channels are of one size (values)."""

    bits: int

    def parts(self, role: str, width: int) -> Parts:
        codes, _ = block_sizes(1, width, self.bits, width, "channels")
        own: Parts = {} if role == "k" else {"scale": ("float16", 1), "least": ("float16", 1)}
        return {"": ("uint8", codes), **own}

    def whole(self, role: str, width: int) -> Parts:
        names = ("scale", "least") if role == "k" else ("size",)
        return {f"channel_{name}": ("float16", width) for name in names}

    def encode(self, x: Tensor, joins: Tensor, role: str) -> dict[str, Tensor]:
        there, most = joins[..., None], 2**self.bits - 1
        x = torch.where(there, x, 0)
        if role == "v":
            size = x.abs().amax(2, keepdim=True).sqrt().clamp(min=LEAST).half()
            apart = (x / size.float()).unsqueeze(3)
            codes, scale, least = group_quantize(apart, self.bits, int(x.shape[3]), "channels")
            return {"": codes, "scale": scale, "least": least, "channel_size": size}
        some = joins.any(2)[..., None, None]
        low = torch.where(there, x, torch.inf).amin(2, keepdim=True)
        high = torch.where(there, x, -torch.inf).amax(2, keepdim=True)
        low, high = torch.where(some, low, 0), torch.where(some, high, 0)
        least = low.half().float()
        step = torch.maximum((high - least) / most, (least - low) * 2)
        scale = (step * WIDER + LEAST).half()
        steps = ((x - least) / scale.float()).round().clamp(0, most)
        codes = packed(torch.where(steps.isnan(), 0, steps).long(), self.bits)
        return {"": codes, "channel_scale": scale, "channel_least": least.half()}

    def decode(self, parts: dict[str, Tensor], width: int, role: str) -> Tensor:
        if role == "v":
            steps = parts[""], parts["scale"], parts["least"]
            apart: Tensor = group_dequantize(*steps, self.bits, width, "channels", 1, width)
            return apart * parts["channel_size"].float()
        scale, least = parts["channel_scale"], parts["channel_least"].float()
        one = torch.ones_like(scale[..., :1])
        steps = parts[""], one, torch.zeros_like(one)
        codes: Tensor = group_dequantize(*steps, self.bits, width, "channels", 1, width)
        return codes * scale.float() + least
