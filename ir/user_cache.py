"""accel's folder in the user's cache: what can be made again, kept where no other user can write.

What lies there is code that is loaded and figures that are believed, so nothing is read from a folder that
another user could have filled. This guards against other users, not against programs that run as the same user.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

_OPEN = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC")
)


def cache_folder() -> Path:
    """Where accel keeps what it can make again. Raises RuntimeError where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "accel"


def private_folder() -> Path:
    """`cache_folder`, made (mode 0700) where it is missing.

    Raises OSError, with what to do, where it is a link, another user's, or another user could write there; only
    on POSIX systems, because Windows has other rights.
    """
    folder, another = cache_folder(), "or name another cache folder in XDG_CACHE_HOME"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made ({error.strerror}); make it, {another}") from error
    if not hasattr(os, "getuid"):
        return folder
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{folder} is a link; replace it by a folder, {another}")
    if found.st_uid != os.getuid():
        raise OSError(
            f"{folder} belongs to user {found.st_uid}, not to you ({os.getuid()}); "
            f"name another cache folder in XDG_CACHE_HOME"
        )
    if found.st_mode & 0o022:
        raise OSError(
            f"other users may write to {folder}; remove it, or check what it holds and run "
            f"`chmod 700 {folder}`, {another}"
        )
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OSError(
                f"every user may write to {parent}, and so replace {folder}; run `chmod o-w {parent}`, {another}"
            )
    return folder


def open_private(file: Path) -> BufferedReader:
    """A file of the user's own, opened to be read, at once whatever it is.

    Raises OSError where it is a link or no plain file, or where another user owns it or may write it.
    """
    handle = os.open(file, _OPEN)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{file} is not a plain file")
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
            raise OSError(f"{file} belongs to another user, or others may write it")
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_private(file: Path, most: int) -> bytes:
    """The content of such a file. Raises OSError, also where it has more than `most` bytes."""
    with open_private(file) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(f"{file} has more than {most} bytes")
    return content
