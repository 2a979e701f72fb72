"""The dialect, by family. Importing this package registers every operator."""

from accel.ir.ops import attention, kv, norm, rope, rows
from accel.ir.ops.attention import Mask

__all__ = ["Mask", "attention", "kv", "norm", "rope", "rows"]
