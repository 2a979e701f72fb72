"""Published heads: a file is a format; which one a folder has is read from its config.json."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accel.ir.errors import CaptureError

Config = Mapping[str, Any]  # of config.json


@dataclass(frozen=True)
class HeadFormat:
    """A format of published heads.

    method: the drafter that drafts with such a head. is_head: whether a config.json is of this format. taps: the
    outputs of a target of so many layers that it reads. vocab_size: of the target. target_width: of the target's
    hidden states, as far as it is said. module: the head over its tensors; `layers`: of the target.
    """

    method: str
    is_head: Callable[[Config], bool]
    taps: Callable[[Config, int], tuple[str, ...]]
    vocab_size: Callable[[Config], int]
    target_width: Callable[[Config], int]
    module: Callable[[Path, Config, Mapping[str, Tensor], int], nn.Module]


@cache
def formats() -> tuple[HeadFormat, ...]:
    """All formats, in the order of their files."""
    found = list[HeadFormat]()
    for file in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        if not file.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{file.name}")
            found += [one for one in vars(module).values() if isinstance(one, HeadFormat)]
    return tuple(found)


def format_of(config: Config) -> HeadFormat | None:
    """That of a config.json; None: it is of no head."""
    return next((one for one in formats() if one.is_head(config)), None)


def number(path: Path, config: Config, name: str, least: int = 1) -> int:
    """A number of a config.json. Raises CaptureError."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CaptureError(
            f"{path}: config.json says {name} = {value!r}; a head needs a whole number of {least} or more there"
        )
    return value
