"""MXFP4 experts, as gpt-oss is published: X_blocks [X,N,K/32,16] holds two 4-bit floats in a byte, X_scales
[X,N,K/32] powers of two. The model's parameter is [X,K,N].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accel.compiler.load.quantised import Base, Weight, sized, typed
from accel.compiler.load.quantised._floats import e2m1_codes, exponents
from accel.ir.codes import Made
from accel.ir.errors import CaptureError

_BLOCKS, _SCALES, _GROUP = "_blocks", "_scales", 32


@dataclass
class Mxfp4(Base):
    """They are computed in float32; a recipe may round them."""

    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        for packed in [name for name in tensors if name.endswith(_BLOCKS)]:
            name = packed.removesuffix(_BLOCKS)
            scales, blocks = f"{name}{_SCALES}", tensors[packed]
            if scales not in tensors:
                raise CaptureError(
                    f"{packed} has no {scales} beside it: fetch the checkpoint again"
                )
            typed(packed, blocks, 4, torch.uint8)
            typed(scales, tensors[scales], 3, torch.uint8)
            experts, rows, groups, _ = blocks.shape
            sized(packed, blocks, experts, rows, groups, _GROUP // 2)
            sized(scales, tensors[scales], experts, rows, groups)
            make = partial(_experts, blocks, tensors[scales])
            shape = (experts, groups * _GROUP, rows)
            yield Weight(name, Made.of_shape(shape, make, self.pages), (packed, scales))


def _experts(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights [X,K,N]."""
    out = torch.empty(len(blocks), blocks.shape[2] * _GROUP, blocks.shape[1])
    for place, packed, scale in zip(out, blocks, scales, strict=True):
        place.copy_(e2m1_codes(packed.flatten(1), exponents(scale), _GROUP).weight().t())
    return out
