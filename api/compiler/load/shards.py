"""A folder's safetensors files -> its tensors, mapped and not read; damage is found before any work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.ir.errors import CaptureError
from accel.ir.weights import Pages

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass
class Shards:
    """name -> tensor over the mapped files, in the dtype that the files hold."""

    tensors: dict[str, Tensor]
    pages: Pages


def read_shards(folder: Path) -> Shards:
    """Map the weights of a model folder: one file, or those that its index lists.

    Raises:
        CaptureError: a file or a tensor of the index is missing, or a file is cut or damaged.
    """
    shards = Shards({}, Pages())
    if (folder / SINGLE).is_file():
        shards.tensors = _tensors(folder / SINGLE, shards.pages)
        return shards
    if not (folder / INDEX).is_file():
        raise CaptureError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; save the model with "
            "model.save_pretrained(...), which writes them"
        )
    places = _index(folder / INDEX)
    for file in sorted(set(places.values())):
        wanted = [name for name, where in places.items() if where == file]
        path = folder / file
        if path.parent != folder or not path.is_file():
            raise CaptureError(
                f"{folder} lacks {file}, which {INDEX} lists for {len(wanted)} tensors "
                f"({wanted[0]}, …): fetch the whole checkpoint again"
            )
        found = _tensors(path, shards.pages)
        for name in wanted:
            if name not in found:
                raise CaptureError(
                    f"{path} lacks the tensor {name}, which {INDEX} places there: "
                    "fetch the whole checkpoint again"
                )
        shards.tensors |= {n: t for n, t in found.items() if places.get(n, file) == file}
    return shards


def _index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CaptureError(
            f"{path} is not an index of shards: {type(error).__name__}: {error}"
        ) from error


def _tensors(path: Path, pages: Pages) -> dict[str, Tensor]:
    """The tensors of one file, by its header: 8 bytes of length, JSON, then the data."""
    try:
        data = pages.open(path)
        length = int.from_bytes(bytes(data[:8].tolist()), "little")
        header = json.loads(bytes(data[8 : 8 + length].numpy()))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if isinstance(entry["dtype"], str) and entry["dtype"] not in _DTYPES:
                raise CaptureError(
                    f"{path}: {name} is of the type {entry['dtype']}, and accel reads {', '.join(_DTYPES)}; give a "
                    "checkpoint in one of those"
                )
        return {name: _tensor(data[8 + length :], entry) for name, entry in header.items()}
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{path} is cut or damaged ({type(error).__name__}: {error}): fetch it again"
        ) from error


def _tensor(data: Tensor, entry: dict[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"its data ends at byte {len(data)}, a tensor at byte {end}")
    part = data[start:end]
    if part.data_ptr() % dtype.itemsize:  # nothing promises that a tensor is aligned
        part = part.clone()
    return part.view(dtype).reshape(entry["shape"])
