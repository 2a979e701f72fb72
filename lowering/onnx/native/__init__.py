"""Operators of accel's own for onnxruntime, in C++: compiled once per machine, kept in the user's cache.

The graphs that need them stand beside portable ones, so a machine without a compiler loses speed, and
nothing else. The sources use onnxruntime's stable C interface and need no header of it.

A library is code that this process runs. It is loaded only from a folder that no other user can write
(`user_cache.private_folder`), where it is a plain file of the user's own, and where its SHA-256 is the one that was
recorded when it was compiled. The record finds a file that was cut off or damaged; it does not protect from
a program that runs as the same user, which could write the library and its record alike.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from accel.ir.user_cache import open_private, private_folder, read_private
from accel.lowering.onnx.native.compile import (
    SECONDS,
    CompileError,
    Progress,
    compile_library,
    find_compiler,
    key,
)

DOMAIN = "accel"
_REMEMBERED = 24 * 3600  # seconds for which a compiler that failed is not asked again
_SOON = 1  # seconds to wait for another process without a word
_FAILED = "accel's operators cannot be compiled"
_found: list[tuple[Path | None, str]] = []  # what `library` gave first
_first = threading.Lock()


def is_native(file: Path) -> bool:
    """Whether a graph is of the variant that needs the operators."""
    return ".native." in file.name


def register(options: Any) -> None:
    """Make the operators known to a session. Raises OSError with the reason where there are none."""
    path, reason = library()
    if path is None:
        raise OSError(reason)
    options.register_custom_ops_library(str(path))


def on_stderr(step: str, done: float) -> None:
    """Tell people how far it is: on a terminal in one line, else only that it begins."""
    if sys.stderr is None:
        return
    if sys.stderr.isatty():
        end = "\n" if done >= 1 else ""
        print(f"\raccel: {step}: {done:4.0%}", end=end, file=sys.stderr, flush=True)
    elif not done:
        print(f"accel: {step}", file=sys.stderr, flush=True)


def library(progress: Progress = on_stderr) -> tuple[Path | None, str]:
    """The compiled operators, made at first use; or none, and why. A process asks once.

    `progress` is called with what is done and the share of it, where they are compiled. Warns where
    there is a compiler, and they cannot be had all the same.
    """
    with _first:
        if not _found:
            _found.append(_library(progress))
        return _found[0]


def forget() -> None:
    """Let the next `library` look again."""
    _found.clear()


def _library(progress: Progress) -> tuple[Path | None, str]:
    compiler = find_compiler()
    if compiler is None:
        return None, "no C++ compiler was found; install c++, g++ or clang++, or name one in CXX"
    try:
        path = private_folder() / f"native-{key(compiler)}.so"
        if not _whole(path):
            _compiled(compiler, path, progress)
        return path, ""
    except CompileError as error:
        reason = str(error)
    except Timeout:
        reason = f"{_FAILED}: another process has been compiling them for {SECONDS} s"
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home: RuntimeError
        reason = f"{_FAILED}: {error}"
    warnings.warn(f"portable kernels run instead of accel's own: {reason}", stacklevel=3)
    return None, reason


def _compiled(compiler: str, path: Path, progress: Progress) -> None:
    """Compile where no other process has done so meanwhile. Raises CompileError, Timeout, OSError, SubprocessError.

    A failure that the compiler will repeat is remembered for a day.
    """
    failed, parts = path.with_suffix(".failed"), path.with_suffix(".parts")
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=_SOON)
    except Timeout:
        progress("another process compiles the kernels; waiting for it", 0.0)
        lock.acquire(timeout=SECONDS)
    try:
        if _whole(path):
            return
        if (reason := _remembered(failed)) is not None:
            raise CompileError(reason, lasting=True)
        shutil.rmtree(parts, ignore_errors=True)  # of a process that was killed
        parts.mkdir(mode=0o700)
        try:
            made = compile_library(compiler, parts, progress)
        except CompileError as error:
            if error.lasting:
                note = f"{error}; name another compiler in CXX, or remove {failed} to try again"
                failed.write_text(note, encoding="utf-8")
                failed.chmod(0o600)
                raise CompileError(note, lasting=True) from error
            raise
        made.chmod(0o700)
        record = parts / "record"
        record.write_text(_digest(made), encoding="ascii")
        record.chmod(0o600)
        os.replace(made, path)
        os.replace(record, _record(path))
    finally:
        shutil.rmtree(parts, ignore_errors=True)
        lock.release()


def _whole(path: Path) -> bool:
    """Whether the library is there, the user's own, and what was compiled."""
    try:
        return read_private(_record(path), 64) == _digest(path).encode()
    except OSError:
        return False


def _record(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    with open_private(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remembered(failed: Path) -> str | None:
    """Why the compiler failed less than a day ago; None where it did not."""
    try:
        if 0 <= time.time() - failed.stat().st_mtime < _REMEMBERED:
            return read_private(failed, 4096).decode(errors="replace")
    except OSError:
        pass
    return None
