"""Operators of accel's own for onnxruntime, in C++: compiled once per machine, kept in the user's cache.

The graphs that need them stand beside portable ones, so a machine without a compiler loses speed, and
nothing else. The sources use onnxruntime's stable C interface and need no header of it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

DOMAIN = "accel"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)
_SECONDS = 120


def is_native(file: Path) -> bool:
    """Whether a graph is of the variant that needs the operators."""
    return ".native." in file.name


def register(options: Any) -> None:
    """Make the operators known to a session. Raises OSError with the reason where there are none."""
    path, reason = library()
    if path is None:
        raise OSError(reason)
    options.register_custom_ops_library(str(path))


@cache
def library() -> tuple[Path | None, str]:
    """The compiled operators, made at first use; or none, and why.

    A failure is remembered beside where the library would be, until the compiler or accel changes.
    """
    compiler = _compiler()
    if compiler is None:
        return None, "no C++ compiler was found; install c++, g++ or clang++, or name one in CXX"
    try:
        sources = sorted(Path(__file__).parent.glob("*.cc"))
        path = cache_folder() / f"native-{_key(compiler)}.so"
        failed = path.with_suffix(".failed")
        if path.is_file():
            return path, ""
        if failed.is_file():
            return None, failed.read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_FLAGS, *map(str, sources), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                reason = (
                    f"{compiler} failed to compile accel's operators; name another compiler in CXX, or remove {failed} "
                    f"to try again: {done.stderr.strip()[:500]}"
                )
                failed.write_text(reason, encoding="utf-8")
                return None, reason
            os.replace(made, path)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home: RuntimeError
        return None, f"accel's operators cannot be compiled: {error}"
    return path, ""


def cache_folder() -> Path:
    """Where accel keeps what it can make again. Raises RuntimeError where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "accel"


def _compiler() -> str | None:
    if sys.platform == "win32":
        return None
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _key(compiler: str) -> str:
    """What a compiled library is good for: its sources, the compiler and the processor."""
    key = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.[ch]*")):
        key.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key.update(f"{_FLAGS} {version} {platform.machine()} {_processor()}".encode())
    return key.hexdigest()[:16]


def _processor() -> str:
    """The processor's model and capabilities, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return " ".join(line for line in lines if line.startswith(wanted))
