"""Files of trained parts and tables, small tensors beside a frozen model: `tools/train/train.py METHOD` makes
them. No torch.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from accel.ir.errors import AccelError

Tensors = dict[str, npt.NDArray[Any]]


def found(key: str, trained: str) -> Path:
    """The file that a method's option names; empty: what comes with accel, for the bundled model."""
    return Path(trained) if trained else Path(str(files("accel.reference") / f"{key}.safetensors"))


def opened(
    key: str, file: Path, another: str, kind: type[AccelError]
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors (integers as they are, others as float32), and notes of a method's file. Raises `kind`, which ends with
    how to make `another`: the file is not there, damaged, or another method's.
    """
    if not file.is_file():
        raise kind(f"{key}: {file} does not exist; {another}")
    try:
        with safe_open(file, framework="np") as inside:
            told = inside.metadata() or {}
            tensors = {name: _widened(inside.get_tensor(name)) for name in inside.keys()}
    except (OSError, SafetensorError) as error:
        raise kind(
            f"{key}: {file} is not a complete safetensors file ({error}); {another}"
        ) from error
    if told.get("method") != key:
        raise kind(
            f"{key}: {file} holds {told.get('method', 'something that accel did not train')!r}; {another}"
        )
    return tensors, told


def _widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As float32, but integers."""
    return array if array.dtype.kind == "i" else array.astype(np.float32)
