"""Parts that a loop reads, written for models of tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from accel.ir.axis import find_axes
from accel.runtime.decode.trained_part import TrainedPart, sample

from .own_case import file_of

_FOLDER = TemporaryDirectory()


def written(model: Any, key: str, tensors: Any, file: Path) -> str:
    """The file of a method's part, of these tensors, for a model and, where it has one, its draft model."""
    of = {"model": model, "draft": model.draft_model}
    told = {name: sample(one.session) for name, one in of.items() if one is not None}
    arrays = {f"0.{name}": np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(arrays, file, {"method": key, "model": json.dumps(told)})
    return str(file)


@cache
def of_any(axis: str, name: str) -> dict[str, Any]:
    """The option of a method that cannot do without its part: a file of what `part()` of its test file gives, which is
    of no model.
    """
    method = find_axes()[axis].method(name)
    if not issubclass(method, TrainedPart) or method.optional:
        return {}
    tensors = file_of(f"runtime.{axis}", name, "part").part()
    arrays = {f"0.{n}": np.asarray(tensor, np.float32) for n, tensor in tensors.items()}
    file = Path(_FOLDER.name) / name
    told = dict.fromkeys(method.beside, [0.0])
    save_file(arrays, file, {"method": method.key, "model": json.dumps(told)})
    return {"trained": str(file)}
