"""State in mapped files: buffers of which only what is read has to be in memory, and the rest lies on the disk."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from accel.ir.errors import StorageError, shown
from accel.ir.scratch import folder_of_files

_ZEROS = bytes(1 << 20)
_PAGE_OUT = 21  # MADV_PAGEOUT of Linux, which mmap does not name


def mapped(shape: tuple[int, ...], dtype: str, fill: float | None = None) -> npt.NDArray[Any]:
    """An array over a file of its own, which nobody else can open and which goes with the array. Filled, or 0.

    All of its blocks are reserved: a write to a hole of a full disk would end the process. Raises StorageError.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if not size:
        return np.empty(shape, kind)
    folder = folder_of_files()
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="accel-", buffering=0) as file:
            _reserve(file, size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise StorageError(
            f"{shown(folder)} has no room for {size:,} bytes of a session's state, which lies in mapped files "
            f"({error.strerror or error}); free some space, or let TMPDIR name another folder"
        ) from error
    array = np.frombuffer(memory, kind).reshape(shape)
    if fill:
        array.fill(fill)
    return array


def memory_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """The mapped file that an array of `mapped` lies in; none of another."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None


def advise(arrays: Iterable[npt.NDArray[Any]], scattered: bool) -> None:
    """Tell the system how arrays in mapped files are read next: single pages, so that it reads none beside them
    (`scattered`), or all in order. Others are left alone.
    """
    if not hasattr(mmap, "MADV_RANDOM"):
        return
    advice = mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL
    for array in arrays:
        if (memory := memory_of(array)) is not None:
            memory.madvise(advice)


def put_away(arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Write arrays in mapped files to the disk, and let the system drop them from memory until they are read. Others
    are left alone, and all where the system takes no such advice.
    """
    for array in arrays:
        if (memory := memory_of(array)) is not None and hasattr(mmap, "MADV_RANDOM"):
            with suppress(OSError):
                memory.flush()
                memory.madvise(_PAGE_OUT)


def _reserve(file: BinaryIO, size: int) -> None:
    """Make it so long, with every block on the disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, len(_ZEROS)):
        file.write(_ZEROS[: size - start])
