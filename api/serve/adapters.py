"""Folders of adapters that clients may have read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accel.ir.errors import shown
from accel.ir.peft import CONFIG, WEIGHTS
from accel.serve.errors import ApiError


def allowed(path: str, folders: Sequence[Path]) -> Path:
    """The folder that a client names, within one of these, links followed; a relative path is looked for in each.
    Raises ApiError.
    """
    insides = [folder.resolve() for folder in folders]
    try:
        found = [(folder / path).resolve() for folder in insides]
        inside = [one for one in found if _within(one, insides)]
        best = next((one for one in inside if one.is_dir()), inside[0] if inside else None)
        files = [] if best is None else [(best / name).resolve() for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError):  # of a name that no file may have
        best = None
    if best is None or not all(_within(file, insides) for file in files):
        told = f"lora_path {shown(path)} is in no folder of this server's --adapters; give a folder that is"
        raise ApiError(400, told, param="lora_path")
    return best


def _within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
