"""The arrays of a call in one piece of memory, so that one copy brings them to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from accel.runtime.call import Arrays

_APART = 16  # bytes: arrays begin at multiples, as kernels are compiled for
Form = tuple[tuple[str, str, tuple[int, ...]], ...]  # names, dtypes, shapes


@dataclass(frozen=True)
class Sheet:
    """Where the arrays of all calls of a form lie."""

    form: Form
    offsets: tuple[int, ...]
    size: int

    @staticmethod
    def of(arrays: Arrays) -> Sheet:
        """For calls like this one."""
        return _sheet(tuple((n, a.dtype.str, a.shape) for n, a in arrays.items()))

    def filled(self, arrays: Arrays, pinned: bool = False) -> Tensor:
        """Memory on the host that holds them, uint8 [size]; `pinned`: which a device reads while the host goes on."""
        memory = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
        whole = memory.numpy()
        for (name, dtype, shape), at in zip(self.form, self.offsets, strict=True):
            end = at + prod(shape) * np.dtype(dtype).itemsize
            whole[at:end].view(dtype).reshape(shape)[...] = arrays[name]
        return memory

    def views(self, memory: Tensor) -> Mapping[str, Tensor]:
        """The arrays in a piece of memory, as tensors by name."""
        found = {}
        for (name, dtype, shape), at in zip(self.form, self.offsets, strict=True):
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            found[name] = memory[at : at + prod(shape) * kind.itemsize].view(kind).view(shape)
        return found


@lru_cache(maxsize=1024)
def _sheet(form: Form) -> Sheet:
    offsets, end = [], 0
    for _, dtype, shape in form:
        offsets.append(end)
        end += -(-prod(shape) * np.dtype(dtype).itemsize // _APART) * _APART
    return Sheet(form, tuple(offsets), end)
