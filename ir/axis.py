"""Axes and methods: a folder is an axis, a file is a method, and the file name is the name in recipes. There
is no registry.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from accel.ir.errors import InputError, RecipeError, shown, unknown

WHOLE = 2**31 - 1  # the largest size of a whole number in an option that declares no limit


@dataclass(frozen=True)
class Range:
    """The values that an option takes, all of its type where nothing is given. Its `str` is as in `give 1 to 8`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    odd: bool = False
    one_of: tuple[Any, ...] = ()
    multiple_of: str = (
        ""  # another option; whether it is one is not of the range, but of `check_options`
    )

    def __contains__(self, value: Any) -> bool:
        if self.one_of:
            return value in self.one_of
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and not (self.odd and value % 2 == 0)
        )

    def __str__(self) -> str:
        more = [f"a multiple of {self.multiple_of}"] if self.multiple_of else []
        if self.one_of:
            *others, last = map(repr, self.one_of)
            words = [f"{', '.join(others)} or {last}" if others else last]
        elif self.least is not None and self.most is not None:
            words = [f"{self.least} to {self.most}"]
        else:
            bounds = {
                "at least": self.least,
                "more than": self.above,
                "at most": self.most,
                "less than": self.below,
            }
            words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        return "an odd number, " * self.odd + " and ".join(words + more)


def option(
    default: Any,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    odd: bool = False,
    one_of: Iterable[Any] = (),
    multiple_of: str = "",
) -> Any:
    """An option of a method, as a dataclass field: its default and the values that it takes. Without a range it takes
    any value of its type. A count that would hang or fill the memory where it is huge declares `most`. `multiple_of`:
    another option, of which this one holds a whole number of times.

    A subclass that gives another default alone (`page: int = 8`) keeps the range.
    """
    allowed = Range(least, most, above, below, odd, tuple(one_of), multiple_of)
    return dataclasses.field(default=default, metadata={"range": allowed})


def ranges(method: type[Any]) -> Mapping[str, Range | None]:
    """The options of a class of methods: name -> its declared range, the nearest one in its bases; None where none
    declares it.
    """
    found: dict[str, Range | None] = {f.name: None for f in dataclasses.fields(method) if f.init}
    for kind in reversed(method.__mro__):
        for field in vars(kind).get("__dataclass_fields__", {}).values():
            if field.name in found and "range" in field.metadata:
                found[field.name] = field.metadata["range"]
    return found


def check_options(method: Any, full_name: str) -> None:
    """Raise RecipeError where an option of a method is out of its range, a whole number larger than any size, or a
    number that is not finite; or no multiple of the option that it must be one of. Those that come with a request
    (`Method.by_request`) are not of a table, and the method's own to check.
    """
    theirs = getattr(method, "by_request", ())
    declared = {n: allowed for n, allowed in ranges(type(method)).items() if n not in theirs}
    for name, allowed in declared.items():
        value = getattr(method, name)
        give = str(allowed or "")
        if isinstance(value, float) and not math.isfinite(value):  # JSON of an artifact has neither
            give = give or "a finite number"
        elif allowed is not None and value not in allowed:
            if isinstance(value, str):
                raise RecipeError(unknown(f"{full_name}: {name}", value, allowed.one_of))
        elif isinstance(value, int) and abs(value) > WHOLE:
            give = f"at most {WHOLE}" if value > 0 else f"at least {-WHOLE}"
        else:
            continue
        raise RecipeError(f"{full_name}: {name} is {shown(value)}; give {give}")
    for name, allowed in declared.items():
        if allowed is not None and (other := allowed.multiple_of):
            value, unit = getattr(method, name), getattr(method, other)
            if value % unit:
                raise RecipeError(
                    f"{full_name}: {name} is {value}; give a multiple of {other} = {unit}"
                )


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
        """The method with its options. Raises RecipeError for an unknown option, a wrong type, or a value out of its
        range.
        """
        cls = self.method(name)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        for key, value in options.items():
            if key not in fields:
                raise RecipeError(unknown(f"{self.name}.{name} option", key, fields))
            _check_type(f"{self.name}.{name}.{key}", fields[key], value)
        try:
            return cls(**options)
        except InputError as error:  # of a sampler, whose options come with requests, too
            raise RecipeError(f"{self.name}.{name}: {error}") from None


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
