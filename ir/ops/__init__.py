"""The dialect, by family. Importing this package registers every operator."""

from accel.ir.ops import (
    attention,
    centres,
    choice,
    codec,
    experts,
    flat,
    groups,
    kv,
    mass,
    norm,
    pages,
    quantized,
    recurrence,
    rope,
    rows,
    units,
)
from accel.ir.ops.attention import Mask

__all__ = [
    "Mask", "attention", "centres", "choice", "codec", "experts", "flat", "groups", "kv", "mass", "norm", "pages",
    "quantized", "recurrence", "rope", "rows", "units",
]  # fmt: skip
