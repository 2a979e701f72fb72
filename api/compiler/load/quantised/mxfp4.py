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
from accel.ir.codes import Coded, Codes
from accel.ir.errors import CaptureError
from accel.ir.weights import Experts

_BLOCKS, _SCALES, _GROUP = "_blocks", "_scales", 32


@dataclass
class Mxfp4(Base):
    """Their codes stand for the same numbers."""

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
            shape = (rows, groups * _GROUP)
            found = [
                Coded.of_shape(shape, partial(_codes, *pair), "mxfp4", self.pages)
                for pair in zip(blocks, tensors[scales], strict=True)
            ]
            yield Weight(name, Experts.stack(found, turned=True), (packed, scales))


def _codes(blocks: Tensor, scales: Tensor) -> Codes:
    """Of one expert: [N,K/32,16] and [N,K/32]."""
    return e2m1_codes(blocks.flatten(1), exponents(scales), _GROUP)
