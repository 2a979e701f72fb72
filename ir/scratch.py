"""Where large temporary files lie, and memory that a build is done with."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from functools import cache
from typing import Any

SPARED = 0.1  # of a disk, which is left to others


def folder_of_files() -> str:
    """TMPDIR; else /var/tmp, which is on a disk where /tmp may be in memory; else that of `tempfile`."""
    here = os.environ.get("TMPDIR")
    return here or ("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())


def trim() -> None:
    """Return memory that was freed to the system. GNU's allocator keeps what tensors of up to 32 MB took, in pieces
    that larger ones do not fit into: of a model of 135M weights half a gigabyte.
    """
    if (call := _malloc_trim()) is not None:
        call(0)


@cache
def _malloc_trim() -> Any:
    """The allocator's own function, where it has one."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def spare(size: int) -> bool:
    """Whether a temporary file of so many bytes leaves a tenth of the disk free."""
    disk = shutil.disk_usage(folder_of_files())
    return disk.free - size >= SPARED * disk.total
