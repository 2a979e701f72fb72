"""What was measured on this machine, kept in the user's cache folder: `$XDG_CACHE_HOME/accel`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime

from accel.lowering.onnx.native import cache_folder
from accel.lowering.onnx.threads import physical_cores


def machine(threads: int) -> dict[str, Any]:
    """What a measurement depends on beside the graph."""
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "threads": threads,
        "onnxruntime": onnxruntime.__version__,
    }


def cpu_name() -> str:
    """The processor's model, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def recall(kind: str, key: dict[str, Any]) -> Any:
    """The JSON value kept under a key; None where there is none that can be read."""
    try:
        kept = json.loads(_file(kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None
    return kept.get("value") if isinstance(kept, dict) and kept.get("key") == key else None


def remember(kind: str, key: dict[str, Any], value: Any) -> None:
    """Keep a JSON value, whole or not at all; where nothing can be written, it is not kept."""
    try:
        file = _file(kind, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"key": key, "value": value}, out, indent=1)
        os.replace(part, file)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return


def _file(kind: str, key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / kind / f"{name}.json"
