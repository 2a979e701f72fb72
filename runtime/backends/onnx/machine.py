"""What was measured on this machine, kept in the user's cache folder: `$XDG_CACHE_HOME/accel`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from accel.ir.user_cache import private_folder, read_private
from accel.lowering.onnx.ort import ort
from accel.lowering.onnx.threads import physical_cores

_MOST = 1 << 20  # bytes of a file


def machine(threads: int) -> dict[str, Any]:
    """What a measurement depends on beside the graph."""
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "threads": threads,
        "onnxruntime": ort.__version__,
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
    """The JSON value kept under a key; None where there is none to be trusted. Its numbers are finite."""
    try:
        folder = private_folder()
        text = read_private(folder / _name(kind, key), _MOST).decode()
        kept = json.loads(text, parse_float=_finite, parse_int=_short, parse_constant=_finite)
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None
    return kept.get("value") if isinstance(kept, dict) and kept.get("key") == key else None


def remember(kind: str, key: dict[str, Any], value: Any) -> None:
    """Keep a JSON value, whole or not at all; where nothing can be written, it is not kept."""
    try:
        file = private_folder() / _name(kind, key)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump({"key": key, "value": value}, out, indent=1)
            os.replace(part, file)
        except BaseException:
            os.unlink(part)
            raise
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return


def _name(kind: str, key: dict[str, Any]) -> str:
    return (
        f"{kind}/{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
    )


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _short(text: str) -> int:
    if len(text) > 18:
        raise ValueError("an integer of too many digits")
    return int(text)
