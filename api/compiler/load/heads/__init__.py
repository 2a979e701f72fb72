"""Published heads: a file is a format; which one a folder has is read from its config.json."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.shards import read_shards
from accel.ir.errors import CaptureError

Config = Mapping[str, Any]  # of config.json
BIN = "pytorch_model.bin"


@dataclass(frozen=True)
class HeadFormat:
    """A format of published heads.

    method: the drafter that drafts with such a head. is_head: whether a config.json is of this format. vocab_size: of
    the target. target_width: of the target's hidden states, as far as it is said. load: the head in a folder, for a
    target of so many layers in a directory, if that is known. within: it lies in the folder of a model, which it drafts
    for. check: raises CaptureError where a folder has none, before any weight is read.
    """

    method: str
    is_head: Callable[[Config], bool]
    vocab_size: Callable[[Config], int]
    target_width: Callable[[Config], int]
    load: Callable[[Path, Config, int, Path | None], Loaded]
    within: bool = False
    check: Callable[[Path, Config], None] | None = None


@cache
def formats() -> tuple[HeadFormat, ...]:
    """All formats, in the order of their files."""
    found = list[HeadFormat]()
    for file in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        if not file.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{file.name}")
            found += [one for one in vars(module).values() if isinstance(one, HeadFormat)]
    return tuple(found)


def format_of(config: Config, method: str = "") -> HeadFormat | None:
    """That of a config.json; None: it is of no head. method: a drafter, whose heads may lie within models."""
    own = (one for one in formats() if one.within and one.method == method)
    return next((one for one in formats() if one.is_head(config)), next(own, None))


def number(path: Path, config: Config, name: str, least: int = 1) -> int:
    """A number of a config.json. Raises CaptureError."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CaptureError(
            f"{path}: config.json says {name} = {value!r}; a head needs a whole number of {least} or more there"
        )
    return value


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a head by name. Raises CaptureError where a file is missing or damaged."""
    file = path / BIN
    if any(path.glob("*.safetensors")) or not file.is_file():
        return read_shards(path).tensors
    try:
        found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise CaptureError(
            f"{file} is no file of tensors, or damaged ({type(error).__name__}); fetch it again"
        ) from error
    return found
