"""The operators' sources made into a library: files in parallel, each an object, then linked."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

Progress = Callable[[str, float], None]
SECONDS = 600  # for all of it; half a minute on an idle machine, many times that on a busy one
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
)
_SOURCES = Path(__file__).parent
# what a compiler prints when the machine failed, not the sources; it exits with 1 all the same
_PASSING = re.compile(r"signal|killed|memory|no space left|input/output error|quota", re.IGNORECASE)


class CompileError(Exception):
    """The compiler failed. lasting: for a reason that the same compiler has again."""

    def __init__(self, message: str, lasting: bool):
        super().__init__(message)
        self.lasting = lasting


def find_compiler() -> str | None:
    """The path of a C++ compiler: that of CXX, else a usual one; none on Windows."""
    if sys.platform == "win32":
        return None
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def key(compiler: str) -> str:
    """What a compiled library is good for: its sources, the compiler and the processor."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    version = _called([compiler, "--version"], SECONDS).stdout
    digest.update(f"{_FLAGS} {version} {platform.machine()} {_processor()}".encode())
    return digest.hexdigest()[:16]


def compile_library(
    compiler: str, folder: Path, progress: Progress, more: Sequence[str] = ()
) -> Path:
    """The library, in `folder`, which is empty. more: flags after the usual ones, for another processor than this.
    Raises CompileError, OSError or subprocess.TimeoutExpired.
    """
    end = time.monotonic() + SECONDS
    sources = sorted(_SOURCES.glob("*.cc"), key=lambda file: -file.stat().st_size)
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    step = "compiling kernels for this processor, once"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            jobs = [
                pool.submit(_run, [compiler, *_FLAGS, *more, "-c", str(source), "-o", made], end)
                for source, made in zip(sources, objects, strict=True)
            ]
            progress(step, 0.0)
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                progress(step, done / (len(jobs) + 1))
        finally:
            pool.shutdown(cancel_futures=True)
    made = folder / "library.so"
    _run([compiler, "-shared", *objects, "-o", str(made)], end)
    progress(step, 1.0)
    return made


def _called(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """What a compiler says, in English whatever the user's language: reasons are looked for in it, and its version is
    a part of the key.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env={**os.environ, "LC_ALL": "C"},
    )


def _run(command: list[str], end: float) -> None:
    done = _called(command, max(0.0, end - time.monotonic()))
    if done.returncode:
        said = done.stderr.strip()
        raise CompileError(
            f"{command[0]} failed to compile accel's operators (exit status {done.returncode}): {said[:500]}",
            done.returncode > 0 and not _PASSING.search(said),
        )


def _processor() -> str:
    """The processor's model and capabilities, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return " ".join(line for line in lines if line.startswith(wanted))
