"""Fine-grained FP8, as DeepSeek-V3 (arXiv:2412.19437) is published and transformers writes it: a weight in
float8, and beside it X_scale_inv, one number per block of rows and columns (or one for all) to multiply it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from accel.compiler.load.quantised import Base, Weight
from accel.compiler.load.quantised._floats import check_scale, scaled
from accel.ir.codes import Made
from accel.ir.errors import CaptureError

_SCALE = "_scale_inv"


@dataclass
class Fp8(Base):
    """Matrices, and experts [X,N,K]. They are computed in float32, since no integer codes equal them."""

    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        block = self.config.get("weight_block_size")
        if self.config.get("activation_scheme") == "static":
            self.notes.append("activations are not rounded to float8")
        for scale in [name for name in tensors if name.endswith(_SCALE)]:
            name = scale.removesuffix(_SCALE)
            if name not in tensors:
                raise CaptureError(f"{scale} has no {name} beside it: fetch the checkpoint again")
            weight = tensors[name]
            check_scale(scale, weight, tensors[scale], block)
            make = partial(scaled, weight, tensors[scale], block)
            yield Weight(name, Made.of_shape(weight.shape, make, self.pages), (name, scale))
