"""Methods by kind: what a method declares and reads. One method stands for each kind in triples of the matrix,
and in tests of recipes on several models or targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from accel.ir.axis import find_axes

Method = tuple[str, str]  # axis, name
APART = {"small", "grade"}  # which may differ between methods of a kind


@cache
def declared(axis: str, use: str) -> Hashable:
    """The kind as the class shows it: axis, invariants, and which functions and settings of the axis' interface it
    has of its own.
    """
    found = find_axes()[axis]
    base, kind = import_module(found.package).Base, found.method(use)
    method = found.build(use, **found.small(use))
    told = (method.relies, method.breaks, method.provides)
    names = {
        n for each in base.__mro__ for n in (*vars(each), *getattr(each, "__annotations__", ()))
    }
    names = {n for n in names if not n.startswith("_") or n == "__call__"} - APART
    own = ((n, _own(kind, base, n)) for n in sorted(names - {f.name for f in fields(kind)}))
    return axis, *(tuple(sorted(i.name for i in one)) for one in told), *(x for x in own if x[1])


def _own(kind: type[Any], base: type[Any], name: str) -> str:
    """What a class makes of a name of the interface; nothing where this is as in the interface."""
    mine = inspect.getattr_static(kind, name, None)
    if mine is inspect.getattr_static(base, name, None):
        return ""
    return repr(mine) if isinstance(mine, (bool, str)) else "own"


def members(methods: Iterable[Method]) -> list[Method]:
    """The first method of each kind."""
    found: dict[Hashable, Method] = {}
    for axis, use in methods:
        found.setdefault(declared(axis, use), (axis, use))
    return list(found.values())
