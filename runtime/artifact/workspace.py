"""The hidden folder beside an artifact in which it is written, and what becomes of one whose process died.

It holds `lock`, which its process holds while it lives, `new`, which is written, and `old`: what stood at the
destination, where two renames are needed to replace it. While both are there, the destination is not.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accel.ir.errors import ArtifactError

if TYPE_CHECKING:
    from filelock import BaseFileLock

NEW, OLD, _LOCK = "new", "old", "lock"
_GAP = 2.0  # seconds that a living process may take between its two renames


class Workspace:
    """The folder of a process that writes to `out`."""

    def __init__(self, out: Path):
        self.path = out.parent / f".{out.name}.{secrets.token_hex(6)}.accel"
        self.new, self.old = self.path / NEW, self.path / OLD
        self._lock = _lock(self.path, _GAP)  # another process may look whether anyone holds it

    def make(self) -> None:
        """Raises OSError."""
        self.path.mkdir()
        self._lock.acquire()
        self.new.mkdir()

    def remove(self) -> None:
        """With all that it holds."""
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def put_back(out: Path) -> None:
    """Rename what stood at `out` back, where a process died between its two renames. Raises ArtifactError."""
    if os.path.lexists(out):
        return
    for path in _workspaces(out):
        if not _between(path):
            continue
        try:
            with _abandoned(path, _GAP) as mine:
                if mine and _between(path) and not os.path.lexists(out):
                    os.rename(path / OLD, out)
        except OSError as error:
            raise ArtifactError(
                f"{out}: a process died while it replaced this artifact, and what stood here cannot be put back "
                f"({error.strerror}); do it by hand: mv {path / OLD} {out}"
            ) from error


def clean(out: Path) -> None:
    """Remove what dead processes left of their work on `out`."""
    for path in _workspaces(out):
        try:
            with _abandoned(path) as mine:
                if mine and not _between(path):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another user's
            continue


def _workspaces(out: Path) -> list[Path]:
    """All that lie beside `out`, and hold nothing else."""
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{12}}\.accel")
    try:
        beside = [Path(entry) for entry in os.scandir(out.parent) if name.fullmatch(entry.name)]
        return [
            p for p in beside if not p.is_symlink() and {NEW, OLD, _LOCK}.issuperset(os.listdir(p))
        ]
    except OSError:
        return []


def _between(path: Path) -> bool:
    """Whether the old artifact was moved away, and the new one is not in its place yet."""
    return all((path / part).is_dir() and not (path / part).is_symlink() for part in (OLD, NEW))


@contextmanager
def _abandoned(path: Path, wait: float = 0) -> Iterator[bool]:
    """Whether the process of a workspace is dead; nobody else takes it over meanwhile."""
    lock = _lock(path, wait)
    try:
        lock.acquire()
    except TimeoutError:
        yield False
        return
    with lock:
        yield True


def _lock(path: Path, wait: float) -> BaseFileLock:
    """The lock of a workspace, which the system releases when its holder dies."""
    from filelock import FileLock  # not while an artifact is loaded

    return FileLock(path / _LOCK, timeout=wait, thread_local=False)
