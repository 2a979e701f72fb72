"""The checkpoints of a run: whole or not there, the two newest kept."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

KEPT = 2


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes | memoryview) -> None:
    """The file has its name only when all of it is on the disk."""
    new = path.with_name(".new")  # one name: what a killed process left is written over
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@dataclass
class Checkpoints:
    """`checkpoint-STEP.pt`, and beside each `checkpoint-STEP.json`: its digest, written last."""

    folder: Path

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Raises `OSError` where the disk is full; what was saved before is whole then."""
        path = self.folder / f"checkpoint-{step:09}.pt"
        content = io.BytesIO()  # torch.save would not say that a disk is full
        torch.save(state, content)
        _write(path, content.getbuffer())
        told = {"step": step, "sha256": hashlib.sha256(content.getbuffer()).hexdigest()}
        _write(path.with_suffix(".json"), json.dumps(told).encode())
        kept = [f"checkpoint-{step:09}" for step in self._steps()[:KEPT]]
        for suffix in ("json", "pt"):  # in this order: a digest never stands alone
            for old in self.folder.glob(f"checkpoint-*.{suffix}"):
                if old.stem not in kept:
                    old.unlink()

    def load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, or `None`; says which ones it passed over."""
        for step in self._steps():
            path = self.folder / f"checkpoint-{step:09}.pt"
            try:
                told = json.loads(path.with_suffix(".json").read_text())
                if told["sha256"] != _digest(path):
                    raise ValueError("its content is not what was written")
                loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return loaded
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                print(f"{path.name} is not whole ({error}): the one before is taken", flush=True)
        return None

    def _steps(self) -> list[int]:
        """Newest first."""
        return sorted(
            (int(p.stem.split("-")[1]) for p in self.folder.glob("checkpoint-*.json")), reverse=True
        )


def lock(folder: Path) -> IO[str]:
    """Holds a run for this process; raises `SystemExit` where another trains it."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(
            f"{folder} is being trained by another process: stop that one first"
        ) from None
    return file
