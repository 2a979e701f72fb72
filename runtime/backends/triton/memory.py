"""Memory on the device, as sessions share it and as it runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel.ir.errors import OutOfMemoryError


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A tensor on the device that is read and written as an array of the host is, some of its first axis at a time."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As an array has it."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """As an array has it."""
        return self.tensor.new_empty(0, device="cpu").numpy().dtype

    @property
    def nbytes(self) -> int:
        """As an array has it."""
        return self.tensor.nbytes

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """A copy on the host."""
        found: npt.NDArray[Any] = self.tensor[index].cpu().numpy()
        return found.copy() if self.tensor.device.type == "cpu" else found

    def __setitem__(self, index: Any, array: npt.NDArray[Any]) -> None:
        self.tensor[index] = torch.from_numpy(np.ascontiguousarray(array)).to(self.tensor.device)


@contextmanager
def room() -> Iterator[None]:
    """Raises OutOfMemoryError where the device has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{str(error).partition('.')[0]}. The device's memory ran out: give fewer or shorter prompts"
        ) from error
