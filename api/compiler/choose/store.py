"""Results on disk: one file for each recipe, whole or not there. A run that was stopped goes on from them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.ir.errors import ArtifactError, InputError

_SAMPLED = 64  # pieces of each file of weights that are read to tell models apart
_PIECE = 4096  # bytes


class Store:
    """A folder of results. `key`: what all of them depend on (model, prompts, machine, …).

    Only one process writes to it at a time. Raises ArtifactError where it cannot be written.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        self.folder = folder
        self._key = dict(key)
        try:
            (folder / "results").mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / "lock")
        except BlockingIOError:
            raise ArtifactError(
                f"{folder}: another accel-compile choose writes there; wait for it, or give another out=…"
            ) from None
        except OSError as error:
            raise ArtifactError(
                f"cannot write in {folder}: {error.strerror}; give another out=…"
            ) from None

    def read(self, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
        """A recipe's result; None where there is none, or one that was not written to its end."""
        try:
            kept = json.loads(self._file(recipe).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(kept, dict) or kept.get("key") != self._of(recipe):
            return None
        value = kept.get("value")
        return value if isinstance(value, dict) else None

    def write(self, recipe: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep a recipe's result. Raises ArtifactError where the disk does not take it."""
        file = self._file(recipe)
        part = file.with_suffix(".part")
        try:
            text = json.dumps({"key": self._of(recipe), "value": value}, indent=1)
            part.write_text(text, encoding="utf-8")
            os.replace(part, file)
        except OSError as error:
            raise ArtifactError(
                f"cannot write {file}: {error.strerror}; free some space, and run again: results are kept"
            ) from None

    def close(self) -> None:
        """Let another process write."""
        self._lock.close()

    def _of(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps({**self._key, "recipe": recipe}))
        return found

    def _file(self, recipe: Mapping[str, Any]) -> Path:
        text = json.dumps(self._of(recipe), sort_keys=True)
        return self.folder / "results" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _locked(path: Path) -> Any:
    """An open file that this process holds alone; the system lets go when it ends. Raises BlockingIOError."""
    file = path.open("a", encoding="utf-8")
    try:
        import fcntl
    except ImportError:  # Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def fingerprint(model: Path) -> str:
    """Of a model directory: its configuration, and pieces of its weights; of a file: pieces. Raises InputError."""
    found = hashlib.sha256()
    try:
        inside = [model] if model.is_file() else model.iterdir()
        for path in sorted(
            p for p in inside if p == model or p.suffix in (".json", ".safetensors")
        ):
            size = path.stat().st_size
            found.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                whole = size <= _SAMPLED * _PIECE
                starts = [i * (size - _PIECE) // (_SAMPLED - 1) for i in range(_SAMPLED)]
                for start in [0] if whole else starts:
                    file.seek(start)
                    found.update(file.read(size if whole else _PIECE))
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; give a model directory") from None
    return found.hexdigest()[:24]
