"""Axes and methods: a folder is an axis, a file is a method, and the file name is the name in recipes. There
is no registry.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from accel.ir.errors import RecipeError, shown, unknown

WHOLE = 2**31 - 1  # the most of an option that counts, and declares nothing less


def count(default: int, most: int) -> Any:
    """An option that counts, as a dataclass field: its default, and the most that is taken. A larger one would hang,
    or fill the memory.
    """
    return dataclasses.field(default=default, metadata={"most": most})


@dataclass(frozen=True)
class Axis:
    """A folder of interchangeable methods.

    `package` is importable and its `Base` is the interface. Each module in it without a leading underscore
    holds exactly one subclass of `Base`: a dataclass whose fields are its options.
    """

    name: str
    package: str

    def names(self) -> list[str]:
        """Names of the methods as recipes write them (with dashes for the underscores of the file name)."""
        folders = tuple(importlib.import_module(self.package).__path__)
        return list(_names(folders, tuple(os.stat(f).st_mtime_ns for f in folders)))

    def method(self, name: str) -> type[Any]:
        """The class of a method. Raises RecipeError with the nearest name if it does not exist."""
        if name.replace("_", "-") not in self.names():
            raise RecipeError(unknown(f"{self.name} method", name, self.names()))
        module = importlib.import_module(f"{self.package}.{name.replace('-', '_')}")
        base = importlib.import_module(self.package).Base
        found = [
            c
            for c in vars(module).values()
            if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise RecipeError(
                f"{module.__name__} holds {len(found)} classes of {self.name}; a method file holds one"
            )
        return found[0]

    def small(self, name: str) -> dict[str, Any]:
        """The options of a method for tiny models (its `small`), as used by laws, matrices and `tools/new.py`."""
        return dict(self.method(name).small)

    def build(self, name: str, **options: Any) -> Any:
        """The method with its options. Raises RecipeError for an unknown option, a wrong type, too large a count, or
        what is no number.
        """
        cls = self.method(name)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        for option, value in options.items():
            if option not in fields:
                raise RecipeError(unknown(f"{self.name}.{name} option", option, fields))
            where = f"{self.name}.{name}.{option}"
            _check_type(where, fields[option], value)
            _check_count(where, fields[option], value)
        method = cls(**options)
        for option, value in options.items():  # after its own checks, which know the range
            _check_finite(f"{self.name}.{name}.{option}", fields[option], value)
        return method


@cache
def _names(folders: tuple[str, ...], changed: tuple[int, ...]) -> tuple[str, ...]:
    """The modules of these folders, which last changed then: a scan takes a millisecond, a recipe asks fifty times."""
    found = (m.name for m in pkgutil.iter_modules(folders) if not m.ispkg)
    return tuple(sorted(n.replace("_", "-") for n in found if not n.startswith("_")))


def _check_type(where: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value whose plain type differs from the field's default (an int may stand for a float)."""
    if field.default is dataclasses.MISSING or field.default is None:
        return
    want, got = type(field.default), type(value)
    if got is not want and not (want is float and got is int):
        raise RecipeError(
            f"{where} = {shown(value)} is {got.__name__}, not {want.__name__} (default {field.default!r})"
        )


def _check_count(where: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a whole number beyond what the field declares."""
    most = field.metadata.get("most", WHOLE)
    if isinstance(value, int) and not -WHOLE <= value <= most:
        raise RecipeError(f"{where} = {shown(value)} is out of range; give at most {most}")


def _check_finite(where: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse NaN, which every comparison lets pass, and infinity, which the JSON of an artifact cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(
            f"{where} = {value} is not finite; give a number (default {field.default!r})"
        )


def host_method(tables: Any, name: str, default: str) -> Any:
    """The method of an axis of `runtime` that a recipe's tables (JSON) name, or the default. Raises RecipeError."""
    table = tables.get(name, {}) if isinstance(tables, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(table.get("use", default), str):
        raise RecipeError(f"recipe: tables.{name} is not a table; write {{'use': '{default}'}}")
    options = {str(k): v for k, v in table.items() if k != "use"}
    return Axis(name, f"accel.runtime.{name}").build(table.get("use", default), **options)


@cache
def find_axes(roots: tuple[str, ...] = ("accel.passes", "accel.runtime")) -> dict[str, Axis]:
    """All axes of the root packages, by name: sub-packages that define `Base`."""
    axes: dict[str, Axis] = {}
    for root in roots:
        path = importlib.import_module(root).__path__
        for info in pkgutil.walk_packages(path, prefix=root + "."):
            if info.ispkg and hasattr(importlib.import_module(info.name), "Base"):
                name = info.name.removeprefix(root + ".")
                axes[name] = Axis(name, info.name)
    return axes
