"""A folder's safetensors files -> its tensors, mapped and not read; damage is found before any work."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from accel.ir.errors import CaptureError, shown
from accel.ir.weights import Pages

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
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
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        held = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        act = (
            f"fetch {INDEX} of the same model too"
            if any(_SHARD.fullmatch(name) for name in names)
            else "give the checkpoint in transformers' form, as model.save_pretrained(...) writes it"
        )
        raise CaptureError(
            f"{folder} holds neither {SINGLE} nor {INDEX}, but {held or 'no weights'}; {act}"
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CaptureError(
            f"{path} is not an index of shards: {type(error).__name__}: {error}"
        ) from error


def _tensors(path: Path, pages: Pages) -> dict[str, Tensor]:
    """The tensors of one file, by its header: 8 bytes of length, JSON, then the data, which they share without gaps."""
    try:
        data = pages.open(path)
        length = int.from_bytes(bytes(data[:8].tolist()), "little")
        if length > len(data) - 8:
            raise ValueError(f"its header has {length} bytes, and it {len(data)}")
        text = bytes(data[8 : 8 + length].numpy())
        header = json.loads(text, object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        header.pop("__metadata__", None)
        entries = [_entry(path, name, entry) for name, entry in header.items()]
    except CaptureError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path} is cut or damaged ({error}): fetch it again") from error
    found, end, data = {}, 0, data[8 + length :]
    for entry in sorted(entries, key=lambda one: (one.start, one.end)):
        if entry.start != end or entry.end > len(data):
            raise CaptureError(
                f"{path} is cut or damaged ({entry.name} lies at bytes {entry.start} to {entry.end} of {len(data)}, "
                f"and the tensors before it end at {end}): fetch it again"
            )
        end = entry.end
        part = data[entry.start : end]
        if part.data_ptr() % entry.dtype.itemsize:  # nothing promises that a tensor is aligned
            part = part.clone()
        found[entry.name] = part.view(entry.dtype).view(entry.shape)
    if end != len(data):
        raise CaptureError(
            f"{path} is cut or damaged (its tensors end at byte {end} of {len(data)}): fetch it again"
        )
    return {name: found[name] for name in header}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"its header has {next(k for k in keys if keys.count(k) > 1)} twice")
    return found


@dataclass(frozen=True)
class _Entry:
    """What a header says of a tensor. `start`, `end`: bytes of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _entry(path: Path, name: str, described: Any) -> _Entry:
    """Raises CaptureError for a type that accel does not read, ValueError for what does not fit together."""
    given = described if isinstance(described, dict) else {}
    dtype, shape, place = (given.get(key) for key in ("dtype", "shape", "data_offsets"))
    if isinstance(dtype, str) and dtype and dtype not in _DTYPES:
        raise CaptureError(
            f"{path}: {name} is of the type {dtype}, and accel reads {', '.join(_DTYPES)}; give a "
            "checkpoint in one of those"
        )
    if not isinstance(dtype, str) or not dtype or not _numbers(shape) or not _numbers(place):
        raise ValueError(f"{name} is {shown(described)}, not a type, a shape and a place")
    bytes_ = prod(shape) * _DTYPES[dtype].itemsize
    if len(place) != 2 or place[1] - place[0] != bytes_:
        raise ValueError(f"{name} is {dtype} {shape}, which bytes {place} do not hold")
    return _Entry(name, _DTYPES[dtype], tuple(shape), *place)


def _numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
