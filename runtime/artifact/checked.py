"""Artifacts that were checked and have not changed since: opening one again reads none of its weights.

A record in the user's cache, one a folder, stands for its files by device, inode, length and times of change. A write,
a rename or a copy changes one of these, also where somebody sets a file's time back. It guards against damage, as the
checks do that it saves; against other users the rights of the folder do.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from accel.ir.user_cache import private_folder, read_private
from accel.ir.version import VERSION

_SETTLED = 2_000_000_000  # nanoseconds: a file that was just written may be written again within one tick of its clock


def state_of_files(folder: Path, names: Iterable[str]) -> str:
    """What stands for the files of a folder as they are; empty where the system does not say, or they are too new.

    Raises OSError where one cannot be looked at.
    """
    if os.name != "posix":  # elsewhere the time of change is another
        return ""
    found, newest = [], 0
    for name in sorted(names):
        file = (folder / name).stat()
        newest = max(newest, file.st_ctime_ns, file.st_mtime_ns)
        found.append(
            (name, file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        )
    if time.time_ns() - newest < _SETTLED:
        return ""
    return hashlib.sha256(json.dumps([VERSION, found]).encode()).hexdigest()


def is_recorded(folder: Path, state: str) -> bool:
    """Whether a folder's files were checked in this state."""
    if not state:
        return False
    try:
        return read_private(_record(folder), len(state)) == state.encode()
    except (OSError, RuntimeError):
        return False


def record(folder: Path, state: str) -> None:
    """Note that a folder's files were checked in this state, where the user's cache can be written."""
    if not state:
        return
    with suppress(OSError, RuntimeError):
        file = _record(folder)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(state)
        os.replace(made, file)


def _record(folder: Path) -> Path:
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return private_folder() / "checked" / name[:32]
