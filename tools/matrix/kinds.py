"""Methods by kind: what a method declares, reads and changes. One method stands for each kind in triples of the matrix,
and in tests of recipes on several models or targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from accel.ir.axis import find_axes
from accel.ir.program import Program

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


def changed(program: Program, before: Program) -> Hashable:
    """What passes made of a program: entries, parts of state, types of weights, and operators of accel's own."""
    found, known = _contents(program), _contents(before)
    return tuple(sorted(found - known)), tuple(sorted(known - found))


def _contents(program: Program) -> set[str]:
    state = {f"{s.part.name} {s.detail} {s.dtype}" for s in program.state}
    weights = {str(program.params[name].dtype) for name in program.params}
    graphs = (g for entry in program.entries.values() for g in program.graphs(entry))
    targets = {str(node.target) for graph in graphs for node in graph.nodes}
    own = {target for target in targets if target.startswith("accel.")}
    return {*program.entries, *state, *weights, *own, f"{len(program.facts.layers)} layers"}


def members(
    methods: Iterable[Method], kind: Callable[[str, str], Hashable] = declared
) -> list[Method]:
    """The first method of each kind."""
    found: dict[Hashable, Method] = {}
    for axis, use in methods:
        found.setdefault(kind(axis, use), (axis, use))
    return list(found.values())


def alike(
    axis: str, uses: Iterable[str], kind: Callable[[str, str], Hashable] = declared
) -> list[list[str]]:
    """The methods of an axis, by kind."""
    found: dict[Hashable, list[str]] = {}
    for use in uses:
        found.setdefault(kind(axis, use), []).append(use)
    return list(found.values())
