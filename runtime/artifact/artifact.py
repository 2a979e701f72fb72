"""The artifact: a folder with `accel.json` and the files it lists. Written whole or not at all,
read with care.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.errors import ArtifactError, unknown
from accel.ir.facts import Facts
from accel.ir.fields import BUILD_AGAIN, MANIFEST
from accel.ir.state import StateValue
from accel.runtime.artifact.atomic import AtomicOutputDir, user_path
from accel.runtime.artifact.checked import is_recorded, record, state_of_files
from accel.runtime.artifact.contract import bind_graphs, check_graphs
from accel.runtime.artifact.graph import read_graph, read_small
from accel.runtime.artifact.manifest import FORMAT, OWN_DRAFT, Entry, File, Manifest, parse
from accel.runtime.artifact.signature import SIGNATURE, check_signature
from accel.runtime.artifact.workspace import put_back

__all__ = ["Artifact", "Entry", "Facts", "File", "AtomicOutputDir", "StateValue"]
__all__ += [
    "FORMAT",
    "MANIFEST",
    "bind",
    "copy_artifact",
    "digest",
    "open_artifact",
    "own_draft",
    "write_manifest",
]

_CLONE = 0x40049409  # FICLONE of Linux


@dataclass(frozen=True)
class Artifact:
    """An artifact that was checked: where it is and what its manifest says.

    signer: fingerprint of the key that it was asked to be signed with; None: nobody asked.
    """

    path: Path
    manifest: Manifest
    signer: str | None = None

    @property
    def facts(self) -> Facts:
        return self.manifest.facts

    @property
    def state(self) -> tuple[StateValue, ...]:
        return self.manifest.state

    @property
    def entries(self) -> dict[str, Entry]:
        return self.manifest.entries

    @property
    def files(self) -> dict[str, File]:
        return self.manifest.files

    @property
    def recipe(self) -> dict[str, Any]:
        return self.manifest.recipe

    @property
    def report(self) -> dict[str, Any]:
        return self.manifest.report


def bind(
    folder: Path, manifest: dict[str, Any], names: Iterable[str] | None = None
) -> dict[str, str]:
    """Write into the graphs of a folder what they are built with: `manifest`, its `report` aside, and the files that
    are no graphs (of these `names`; by default all); gives sha256 of those.
    """
    names = _names(folder) if names is None else names
    hashes = _hashes(folder, [name for name in names if not name.endswith(".onnx")])
    bind_graphs(folder, manifest, hashes)
    return hashes


def write_manifest(
    folder: Path,
    manifest: dict[str, Any],
    known: Mapping[str, str] | None = None,
    *,
    name: str = MANIFEST,
    names: Iterable[str] | None = None,
) -> None:
    """Write accel.json, or the manifest of this `name`: `manifest` with `files` (bytes and sha256 of every file there,
    or of these `names`) and `digest` filled in. `known`: sha256 of some files.
    """
    known = known or {}
    names = _names(folder) if names is None else sorted(names)
    hashes = {**known, **_hashes(folder, [n for n in names if n not in known])}
    files = {n: {"bytes": (folder / n).stat().st_size, "sha256": hashes[n]} for n in names}
    whole = {**manifest, "files": files}
    whole["digest"] = digest(whole)
    (folder / name).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def open_artifact(
    path: str | os.PathLike[str],
    *,
    hashes: bool = True,
    public_key: str | os.PathLike[str] | None = None,
) -> Artifact:
    """Read and check an artifact. Raises ArtifactError with what is wrong, where, and what to do.

    `hashes=False` leaves out the checksums: for a folder that this process has just written. Files that have not
    changed since they were checked are not checked again (`checked.py`).
    `public_key`: path of the key with which it must be signed; nothing is parsed before. Raises InputError where it
    is no such key.
    """
    folder = user_path(path)
    put_back(folder.resolve())
    try:
        _check_folder(folder)
    except OSError as error:
        raise ArtifactError(
            f"{folder} cannot be looked into ({error.strerror}); give a folder that you may read"
        ) from error
    try:
        data = read_small(folder / MANIFEST)
    except OSError as error:
        raise _unreadable(folder / MANIFEST, error) from error
    signer = None if public_key is None else check_signature(folder, data, public_key)
    manifest = _read(folder, MANIFEST, data)
    try:
        for name, file in manifest.files.items():
            _check_file(folder, name, file)
        state = state_of_files(folder, [MANIFEST, *manifest.files]) if hashes else ""
        if not is_recorded(folder, state):
            _check_graphs(folder, manifest)
            if hashes:
                _check_hashes(folder, manifest)
            record(folder, state)
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from error
    return Artifact(folder.resolve(), manifest, signer)


def own_draft(artifact: Artifact) -> Artifact | None:
    """The draft model over the weights of this artifact, which was checked: its files are among the artifact's. None
    where there is none. Raises ArtifactError.
    """
    if OWN_DRAFT not in artifact.files:
        return None
    folder = artifact.path
    try:
        data = read_small(folder / OWN_DRAFT)
    except OSError as error:
        raise _unreadable(folder / OWN_DRAFT, error) from error
    manifest = _read(folder, OWN_DRAFT, data)
    try:
        for name, file in manifest.files.items():
            if artifact.files.get(name) != file:
                raise ArtifactError(
                    f"{OWN_DRAFT}: file {name!r} is not the one of {MANIFEST}; {BUILD_AGAIN}"
                )
        _check_graphs(folder, manifest)
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from error
    return Artifact(folder, manifest, artifact.signer)


def _read(folder: Path, name: str, data: bytes) -> Manifest:
    """The manifest in a file's bytes, as it was written. Raises ArtifactError."""
    try:
        raw = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(folder / name, error) from error
    try:
        manifest = parse(raw)
        if manifest.digest != digest(manifest.raw):
            raise ArtifactError(
                f"{name} was changed after the build: its digest does not match; {BUILD_AGAIN}"
            )
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from error
    return manifest


def _check_graphs(folder: Path, manifest: Manifest) -> None:
    """Raise ArtifactError where a graph is not what the manifest says."""
    named = {name for entry in manifest.entries.values() for name in entry.files}
    named |= {name for name in manifest.files if name.endswith(".onnx")}
    check_graphs(manifest, {name: read_graph(folder / name) for name in sorted(named)})


def _unreadable(path: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{path} cannot be read: {error}. It is damaged: build the artifact again")


def copy_artifact(source: Artifact, out: str | os.PathLike[str]) -> None:
    """A copy of the artifact at another place. Where the file system can, both share their blocks until one changes.

    Raises ArtifactError.
    """
    names = [MANIFEST, *source.files]
    if (source.path / SIGNATURE).is_file():
        names.append(SIGNATURE)
    size = sum(f.bytes for f in source.files.values())
    with AtomicOutputDir(out) as folder:
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            here = (source.path / name).resolve()
            if _cloned(here, target):
                continue
            free = shutil.disk_usage(folder).free
            if free < here.stat().st_size:
                raise ArtifactError(
                    f"no space for the artifact in {folder.parent}: {size:,} bytes are needed, "
                    f"{free:,} are free. Free some, or give another output folder"
                )
            shutil.copyfile(here, target)


def _cloned(here: Path, target: Path) -> bool:
    """Whether the file system made a copy that shares the blocks of a file (btrfs, XFS)."""
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    try:
        with here.open("rb") as source, target.open("wb") as copy:
            fcntl.ioctl(copy.fileno(), _CLONE, source.fileno())
    except OSError:  # another file system, or one that cannot
        target.unlink(missing_ok=True)
        return False
    return True


def _check_folder(folder: Path) -> None:
    """Is it an artifact at all? If not, say what it seems to be."""
    if (folder / MANIFEST).is_file():
        return
    if folder.name == MANIFEST and folder.is_file():
        raise ArtifactError(f"{folder} is a file of an artifact; give its folder, {folder.parent}")
    if not folder.exists():
        try:
            beside = [p.name for p in folder.parent.iterdir()]
        except OSError:
            beside = []
        hint = unknown("artifact", folder.name, beside)
        build = "it does not exist; accel-compile build MODEL --out DIR makes an artifact"
        raise ArtifactError(f"{folder}: {hint if 'did you mean' in hint else build}")
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; an artifact is a folder with {MANIFEST}")
    if (folder / "config.json").is_file():
        raise ArtifactError(
            f"{folder} is a Hugging Face model, not an artifact. Build one first: "
            f"accel-compile build {folder} --out DIR, or accel.optimize({str(folder)!r})"
        )
    raise ArtifactError(
        f"{folder} has no {MANIFEST}, so it is not a complete artifact; "
        "make one with accel-compile build"
    )


def _inside(folder: Path, name: str) -> Path:
    """Where a name in the manifest points, refusing every way out of the folder, links included."""
    if set(name) & set("\\:*\0") or set(name.split("/")) & {"", ".", ".."}:
        raise ArtifactError(
            f"file {name!r} is not a plain path inside the artifact; do not trust it"
        )
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ArtifactError(f"file {name!r} is a link out of the artifact; do not trust it")
    return path


def _check_file(folder: Path, name: str, file: File) -> None:
    """Inside, there, and as long as it should be."""
    path = _inside(folder, name)
    if path.exists() and not path.is_file():
        raise ArtifactError(f"file {name!r} is no regular file; do not trust it")
    if not path.is_file():
        raise ArtifactError(f"file {name!r} is missing; copy the whole folder, or build it again")
    if (size := path.stat().st_size) != file.bytes:
        raise ArtifactError(
            f"file {name!r} has {size:,} bytes, not {file.bytes:,}; copy it again, or build it "
            "again"
        )


def _check_hashes(folder: Path, manifest: Manifest) -> None:
    """Every file holds what it held when it was built."""
    found = _hashes(folder, manifest.files)
    for name, file in manifest.files.items():
        if found[name] != file.sha256:
            raise ArtifactError(
                f"file {name!r} was changed or damaged: its sha256 is {found[name][:12]}…, "
                f"not {file.sha256[:12]}…; copy it again, or build it again"
            )


def _names(folder: Path) -> list[str]:
    """Every file of an artifact but its manifest and the signature of that."""
    files = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in files if name not in (MANIFEST, SIGNATURE))


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of each file, largest first, on several threads."""

    def digest_of(name: str) -> str:
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    order = sorted(names, key=lambda n: -(folder / n).stat().st_size)
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(order, pool.map(digest_of, order), strict=True))


def digest(manifest: dict[str, Any]) -> str:
    """sha256 of a manifest without its digest, in one form whatever the white space and order."""
    rest = {k: v for k, v in manifest.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
