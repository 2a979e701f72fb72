"""All or nothing: a hidden folder beside the destination that takes its place when it is whole.

An exception removes it; so does a tiny watchdog process when this one is killed. Where the system can exchange two
folders (Linux), there is no moment without the destination; elsewhere the watchdog puts the old one back. Where it was
killed too, the next build or load does (`workspace`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from accel.ir.errors import ArtifactError, LoweringError, shown
from accel.ir.fields import MANIFEST
from accel.runtime.artifact.signature import SIGNATURE
from accel.runtime.artifact.workspace import Workspace, clean, put_back

# Waits until the parent has gone (its end of the pipe closed, or another parent), then puts things
# right: an old artifact that was set aside comes back unless the new one took its place; the
# workspace goes.
_WATCHDOG = """
import os, select, shutil, sys
work, new, old, target, parent, *made = sys.argv[1:]
while not (select.select([0], [], [], 1)[0] and not os.read(0, 1)) and os.getppid() == int(parent):
    pass
if os.path.isdir(old) and os.path.isdir(new) and not os.path.lexists(target):
    os.rename(old, target)
shutil.rmtree(work, ignore_errors=True)
if not os.path.lexists(target):
    for path in made:
        try:
            os.rmdir(path)
        except OSError:
            break
"""
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path that a user gave, `~` expanded. Raises ArtifactError where the system takes no such path."""
    try:
        found = Path(path).expanduser()
        os.lstat(found)
    except FileNotFoundError:
        return found
    except RuntimeError:
        raise ArtifactError(f"{path}: there is no such user; write the folder's path out") from None
    except TypeError:
        raise ArtifactError(
            f"{shown(path)} is a {type(path).__name__}, not a path; give a str or a pathlib.Path"
        ) from None
    except ValueError:
        raise ArtifactError(f"{str(path)!r} holds a NUL character, which no path does") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ArtifactError(
                f"{str(path)[:60]}…: the path is too long; give a shorter one"
            ) from None
    return found


class AtomicOutputDir:
    """`with AtomicOutputDir(out) as folder:` write into `folder`; afterwards it is `out`. Raises
    ArtifactError.

    `out` may exist if it is empty, or an artifact with no file beside those that its manifest lists; that is
    replaced. `needs`: bytes to be written, where known; too little free space is then refused before any work.
    `what` is written, for errors; where that is no artifact, `out` must not exist.
    """

    def __init__(
        self, out: str | os.PathLike[str], needs: int | None = None, what: str = "artifact"
    ):
        self.out = user_path(out).resolve()
        self.needs, self.what = needs, what
        self._work = Workspace(self.out)
        self._made: list[Path] = []  # parents made for it, innermost first
        self._watchdog: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise ArtifactError where `out` cannot be written, before any work is done for it."""
        put_back(self.out)
        self._check_replaceable()
        parent = next(p for p in self.out.parents if p.exists())
        try:  # what a system lets no one write in, it does not always say before
            os.rmdir(tempfile.mkdtemp(prefix=f".{self.out.name}.", dir=parent))
        except OSError as error:
            raise ArtifactError(
                f"cannot write in {parent}: {error.strerror}; give another output folder"
            ) from error

    def __enter__(self) -> Path:
        self.check()
        clean(self.out)
        try:
            self._make()
            free = shutil.disk_usage(self.out.parent).free
        except OSError as error:
            self._remove()
            raise ArtifactError(
                f"cannot write in {self.out.parent}: {error.strerror}; give another output folder"
            ) from error
        except BaseException:
            self._remove()
            raise
        if self.needs is not None and free < self.needs:
            self._remove()
            raise self._no_space(f"{self.needs:,} bytes are needed, {free:,} are free")
        return self._work.new

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._commit()
            except OSError as failure:
                error = failure
            except BaseException:
                self._remove()
                raise
        if error is None:
            self._work.remove()
            self._dismiss()
            return
        full = _disk_full(error)
        words = self._space() if full else ""
        self._remove()
        if full:
            raise self._no_space(words) from error
        if kind is None:
            raise ArtifactError(f"cannot put the {self.what} at {self.out}: {error}") from error

    def _make(self) -> None:
        """The folder and its watchdog."""
        missing = [p for p in (self.out.parent, *self.out.parents[1:]) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir()
            self._made.insert(0, parent)
        paths = self._work.path, self._work.new, self._work.old, self.out
        arguments = [*map(str, paths), str(os.getpid()), *map(str, self._made)]
        try:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHDOG, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/" if os.name == "posix" else None,
            )
        except OSError:  # no room for another process: exceptions still clean up
            self._watchdog = None
        self._work.make()

    def _check_replaceable(self) -> None:
        """Only an artifact or an empty folder may be replaced: never a user's own files."""
        if not self.out.name:
            raise ArtifactError(f"{self.out} cannot be an {self.what}; give a folder below it")
        if not os.path.lexists(self.out):
            return
        if self.what != "artifact":
            raise ArtifactError(f"{self.out} exists; give the name of a folder that does not")
        if not self.out.is_dir():
            raise ArtifactError(f"{self.out} is a file; give another output folder")
        if not any(self.out.iterdir()):
            return
        if not (self.out / MANIFEST).is_file():
            raise ArtifactError(
                f"{self.out} holds files but no {MANIFEST}, so it is not an artifact to replace; "
                "empty it, or give another output folder"
            )
        listed = _listed(self.out / MANIFEST)
        if listed is None:
            raise ArtifactError(
                f"{self.out}: its {MANIFEST} lists no files, so it is not an artifact to replace; "
                "move it away, or give another output folder"
            )
        found = (
            p.relative_to(self.out)
            for p in sorted(self.out.rglob("*"))
            if not p.is_dir() or p.is_symlink()
        )
        others = [p.as_posix() for p in found if p.as_posix() not in listed]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise ArtifactError(
                f"{self.out} holds {', '.join(others[:3])}{more} beside the files of an artifact; "
                "move them away, or give another output folder"
            )

    def _commit(self) -> None:
        """Put it into place; what stood there is left in the workspace."""
        self._check_replaceable()
        new, old = self._work.new, self._work.old
        if self.out.exists():
            _flush(new)
            if _exchanged(new, self.out):
                return
            os.rename(self.out, old)
        try:
            os.rename(new, self.out)
        except BaseException:
            if old.exists():
                os.rename(old, self.out)
            raise

    def _remove(self) -> None:
        self._work.remove()
        for parent in self._made:
            try:
                parent.rmdir()
            except OSError:  # someone else put something there
                break
        self._dismiss()

    def _dismiss(self) -> None:
        """Let the watchdog end; it finds nothing left to do."""
        dog, self._watchdog = self._watchdog, None
        if dog is not None:
            assert dog.stdin is not None
            dog.stdin.close()
            try:
                dog.wait(10)
            except subprocess.TimeoutExpired:
                dog.kill()
                dog.wait()

    def _space(self) -> str:
        """What is known of the space when it ran out."""
        written = sum(p.stat().st_size for p in self._work.new.rglob("*") if p.is_file())
        try:
            free = f"{shutil.disk_usage(self.out.parent).free:,} were free"
        except OSError:
            free = "free space is unknown"
        if self.needs is not None:
            return f"{self.needs:,} bytes are needed; {written:,} had been written, {free}"
        return f"{written:,} bytes had been written, {free}"

    def _no_space(self, words: str) -> ArtifactError:
        return ArtifactError(
            f"no space for the {self.what} in {self.out.parent}: {words}. Free some, or give another "
            "output folder"
        )


def _listed(manifest: Path) -> set[str] | None:
    """The files of the artifact that a manifest is of, with itself and its signature; None where it is no manifest."""
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    files = told.get("files") if isinstance(told, dict) else None
    return {MANIFEST, SIGNATURE, *files} if isinstance(files, dict) and files else None


def _flush(folder: Path) -> None:
    """Have a folder on the disk, so that a power cut cannot take it once nothing else is left."""
    for path in (*folder.rglob("*"), folder):
        if path.is_file() or os.name == "posix":
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def _exchanged(folder: Path, other: Path) -> bool:
    """Whether two folders took each other's place, in one step; False where the system cannot do that."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # not while an artifact is loaded

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    return bool(call(_HERE, os.fsencode(folder), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk or quota."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def writable(path: str | Path) -> Path:
    """A folder to write into, made where it is missing."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoweringError(
            f"cannot write in {folder}: {error.strerror}; give another folder"
        ) from error
    return folder
