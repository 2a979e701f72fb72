"""Kinds of making parts, of which `runs/` has a file each."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.ir.axis import find_axes

RUNS = "accel.compiler.train.runs"


@dataclass(frozen=True)
class Made:
    """A part's file, and what to say of it; no file: the run was left, and can go on."""

    file: Path | None
    message: str


class Tuning:
    """A training that is of no method: a model learns itself, and a build is given what comes of it. A subclass is a
    frozen dataclass whose fields are its options, which recipes do not name. `drafts`: the model is a draft model.
    """

    key: ClassVar[str]
    drafts: ClassVar[bool] = False


class Kind(ABC):
    """How the file of some methods is made. `folder`: one that a build is given, in place of a file that it finds.
    `tunes`: the tuning that it is of, if it is of no method. `usual`: options that differ from the general ones.
    `on_devices`: it learns on other devices than the processor, too.
    """

    folder: ClassVar[bool] = False
    tunes: ClassVar[type[Tuning] | None] = None
    usual: ClassVar[Mapping[str, Any]] = {}
    on_devices: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def takes(cls, method: type[Any]) -> bool:
        """Whether it is for this method; no other kind is."""

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """The option that must be given, and is not: what to tell."""
        return None

    @classmethod
    @abstractmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """Write a file of a method's part. Raises AccelError."""


@cache
def kinds() -> tuple[type[Kind], ...]:
    """One of each file of `runs/`."""
    found: list[type[Kind]] = []
    for info in pkgutil.iter_modules(importlib.import_module(RUNS).__path__):
        module = importlib.import_module(f"{RUNS}.{info.name}")
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Kind)
            and value.__module__ == module.__name__
        ]
    return tuple(found)


def kind_of(method: type[Any]) -> type[Kind] | None:
    """The kind of a method; none where it has no trained part and no table."""
    return next((kind for kind in kinds() if kind.takes(method)), None)


def trained_methods() -> dict[str, tuple[str, type[Any]]]:
    """Every method with a trained part or a table, by name: its axis and its class."""
    every = (
        (name, axis.name, axis.method(name))
        for axis in find_axes().values()
        for name in axis.names()
    )
    return {name: (axis, method) for name, axis, method in every if kind_of(method) is not None}


def tunings() -> dict[str, type[Tuning]]:
    """Every tuning, by name."""
    return {one.key: one for kind in kinds() if (one := kind.tunes) is not None}
