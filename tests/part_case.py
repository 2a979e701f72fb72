"""Parts that a loop reads, written for models of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from accel.runtime.decode.trained_part import sample


def written(model: Any, key: str, tensors: Any, file: Path) -> str:
    """The file of a method's part, of these tensors, for a model and, where it has one, its draft model."""
    of = {"model": model, "draft": model.draft_model}
    told = {name: sample(one.session) for name, one in of.items() if one is not None}
    arrays = {f"0.{name}": np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(arrays, file, {"method": key, "model": json.dumps(told)})
    return str(file)
