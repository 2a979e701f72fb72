"""Where large temporary files lie."""

from __future__ import annotations

import os
import shutil
import tempfile

SPARED = 0.1  # of a disk, which is left to others


def folder_of_files() -> str:
    """TMPDIR; else /var/tmp, which is on a disk where /tmp may be in memory; else that of `tempfile`."""
    here = os.environ.get("TMPDIR")
    return here or ("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())


def spare(size: int) -> bool:
    """Whether a temporary file of so many bytes leaves a tenth of the disk free."""
    disk = shutil.disk_usage(folder_of_files())
    return disk.free - size >= SPARED * disk.total
