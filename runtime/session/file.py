"""The file of a saved session: safetensors, with JSON about it in the metadata. Written whole or not at all, checked
when it is read, and free of code. Or the same as bytes, to be sent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save_file
from safetensors.numpy import save as packed

from accel.ir.errors import ArtifactError, SavedSessionError
from accel.ir.version import VERSION
from accel.runtime.artifact.artifact import digest
from accel.runtime.artifact.atomic import user_path
from accel.runtime.artifact.workspace import Workspace, clean

FORMAT = 1
Arrays = dict[str, npt.NDArray[Any]]
_KEY = "accel.session"  # of the metadata
_AGAIN = "save the session again"


def write(
    path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Let a file be of these arrays and this JSON. A saved session that is there is replaced, in one step; other files
    are not. What processes that were killed left beside it is removed. Raises SavedSessionError.
    """
    out = _path(path)
    held, whole = _whole(header, arrays)
    if out.exists():
        try:
            _checked(out)
        except SavedSessionError as error:
            raise SavedSessionError(
                f"{out} is there, and is no saved session that is whole; move it away, or give another file"
            ) from error
    clean(out)
    work = Workspace(out)
    try:
        work.make()
        save_file(held, work.new / out.name, {_KEY: json.dumps(whole)})
        _flush(work.new / out.name)
        os.replace(work.new / out.name, out)
    except (OSError, SafetensorError) as error:
        size = sum(array.nbytes for array in held.values())
        raise SavedSessionError(
            f"{out} cannot be written ({error}); it needs {size:,} bytes. The session goes on as it was: free some "
            "space, or give another file"
        ) from error
    finally:
        work.remove()


def pack(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """What a file of these would hold."""
    held, whole = _whole(header, arrays)
    found: bytes = packed(held, {_KEY: json.dumps(whole)})
    return found


def unpack(data: bytes, name: str) -> tuple[dict[str, Any], Arrays]:
    """The JSON and the arrays of what `pack` gave, every byte checked. Raises SavedSessionError, with the name."""
    try:
        size = int.from_bytes(data[:8], "little")
        told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_KEY])
        arrays = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SavedSessionError(
            f"{name} is no saved session, or was cut or damaged ({error}); send it again"
        ) from error
    if not isinstance(told, dict) or not isinstance(told.get("arrays"), dict):
        raise SavedSessionError(
            f"{name} is no saved session: {_KEY} lists no arrays; send it again"
        )
    _check_header(name, told)
    _check_arrays(name, told, arrays)
    return told, arrays


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Arrays]:
    """The JSON and the arrays of a file, which is mapped, and whose every byte is checked. Raises SavedSessionError."""
    file = _path(path)
    told = _checked(file)
    _check_header(file, told)
    try:
        with safe_open(file, framework="np") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}
    except (OSError, SafetensorError) as error:
        raise SavedSessionError(f"{file} cannot be read ({error}); {_AGAIN}") from error
    _check_arrays(file, told, arrays)
    return told, arrays


def _whole(
    header: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The arrays as they are written, and all that is said of them."""
    held = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    whole = {**header, "format": FORMAT, "accel": VERSION, "arrays": _described(held)}
    whole["digest"] = digest(whole)
    return held, whole


def _check_header(file: Any, header: dict[str, Any]) -> None:
    """Raise SavedSessionError where it is of another version, or was changed."""
    version = header.get("format")
    if version != FORMAT:
        raise SavedSessionError(
            f"{file}: format {version} is not {FORMAT}, which accel {VERSION} reads; {_AGAIN}, or take accel "
            f"{header.get('accel')}"
        )
    if header.get("digest") != digest(header):
        raise SavedSessionError(
            f"{file} was changed or damaged: its header has another digest; {_AGAIN}"
        )


def _check_arrays(file: Any, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Raise SavedSessionError where an array is not the one that the header says."""
    found, wanted = _described(arrays), header["arrays"]
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            what = "is missing" if name not in found else "was changed or damaged"
            raise SavedSessionError(f"{file}: {name} {what}; copy the file again, or {_AGAIN}")


def _path(path: str | os.PathLike[str]) -> Path:
    """Of a file that a user named."""
    try:
        found = user_path(path).resolve()
    except ArtifactError as error:
        raise SavedSessionError(str(error)) from None
    try:
        folder = found.is_dir()
    except OSError as error:
        raise SavedSessionError(
            f"{found} cannot be looked at ({error.strerror}); give a file that you may read and write"
        ) from error
    if folder:
        raise SavedSessionError(f"{found} is a folder; give the path of a file")
    return found


def _checked(file: Path) -> dict[str, Any]:
    """What a file says of itself, if it is a saved session."""
    if not file.is_file():
        raise SavedSessionError(f"{file} does not exist; session.save(path) makes one")
    try:
        with safe_open(file, framework="np") as opened:
            told = json.loads((opened.metadata() or {})[_KEY])
    except SafetensorError as error:
        raise SavedSessionError(
            f"{file} is no saved session, or was cut or damaged ({error}); copy it again, or {_AGAIN}"
        ) from error
    except (OSError, ValueError, RecursionError, KeyError) as error:
        raise SavedSessionError(
            f"{file} is no saved session: {_KEY} of its metadata is missing or no JSON; give a file that session.save "
            "wrote"
        ) from error
    if not isinstance(told, dict) or not isinstance(told.get("arrays"), dict):
        raise SavedSessionError(f"{file} is no saved session: {_KEY} lists no arrays; {_AGAIN}")
    return told


def _described(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Type, shape and sha256 of each, on several threads."""
    with ThreadPoolExecutor(4) as pool:
        hashes = pool.map(
            lambda a: hashlib.sha256(a.reshape(-1).view(np.uint8)).hexdigest(), arrays.values()
        )
        return {
            name: {"dtype": array.dtype.name, "shape": list(array.shape), "sha256": sha256}
            for (name, array), sha256 in zip(arrays.items(), hashes, strict=True)
        }


def _flush(file: Path) -> None:
    """Have it on the disk before it takes another's place."""
    with open(file, "rb+") as opened:
        os.fsync(opened.fileno())
