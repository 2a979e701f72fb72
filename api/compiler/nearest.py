"""For a recipe that is refused: the smallest change of it that is accepted, found by trying."""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from accel.ir.axis import Axis, find_axes
from accel.ir.errors import AccelError, RecipeError
from accel.ir.invariants import Method
from accel.ir.recipe import Recipe
from accel.ir.tables import Tables as TableMethod
from accel.passes.trained import Trained

SECONDS = 30.0  # spent on trying, at most about this
Tables = dict[str, dict[str, Any]]
Try = Callable[[Recipe], Any]  # raises AccelError where a recipe is refused
First = Literal["drop", "swap", "options"]


@dataclass(frozen=True)
class Nearest:
    """The recipe that works, and what was changed; None where none of those `tried` does."""

    recipe: Recipe | None
    change: str
    tried: int


def nearest(
    recipe: Recipe,
    reason: str,
    attempt: Try,
    watch: Callable[[str], None] = lambda _: None,
    first: First = "drop",
) -> Nearest:
    """Try smaller changes before larger ones, and first those of what the refusal names.

    first: what is tried first: to leave a method out, to take another method of its axis, or, where an
    option's value was refused, its default.
    """
    end, tried = time.perf_counter() + SECONDS, 0
    for tables, change in _candidates(recipe, reason, first):
        if tried and time.perf_counter() > end:
            return Nearest(None, "", tried)
        tried += 1
        watch(change)
        found = replace(recipe, name=f"{recipe.name}, {change}", tables=tables)
        try:
            attempt(found)
        except AccelError:
            continue
        return Nearest(found, change, tried)
    return Nearest(None, "", tried)


def _candidates(recipe: Recipe, reason: str, first: First) -> Iterator[tuple[Tables, str]]:
    """Options at their defaults; one table less; another method in its place; two tables less."""
    axes = find_axes()
    known = {n: t for n, t in recipe.tables.items() if n in axes}
    if len(known) < len(recipe.tables):
        gone = ", ".join(f"[{n}]" for n in recipe.tables if n not in known)
        yield known, f"without {gone}"
    named = [name for name in known if _named(name, known[name], reason)]
    order = [*named, *(name for name in known if name not in named)]
    plain = [
        ({**known, name: {"use": use}}, f"with the default options of {name} {use}")
        for name in order
        if len(known[name]) > 1 and (use := known[name]["use"]) in axes[name].names()
    ]
    if first == "options":
        yield from plain
    if first == "swap":
        yield from _swaps(axes, known, named)
    for name in order:
        yield _without(known, name), f"without [{name}] {known[name]['use']}"
    if first != "options":
        yield from plain
    yield from _swaps(axes, known, order)
    for pair in itertools.combinations(order, 2):
        yield (
            _without(known, *pair),
            "without " + " and ".join(f"[{n}] {known[n]['use']}" for n in pair),
        )


def _swaps(axes: dict[str, Axis], tables: Tables, names: list[str]) -> Iterator[tuple[Tables, str]]:
    """Another method in the place of one: first what is most like it."""
    found = [
        (far, name, other) for name in names for far, other in _others(axes[name], tables[name])
    ]
    for _, name, other in sorted(found, key=lambda one: one[0]):
        yield {**tables, name: {"use": other}}, f"with {name} {other} for {tables[name]['use']}"


def _without(tables: Tables, *names: str) -> Tables:
    """The other tables; where a score goes, all that says how it is used goes too."""
    eviction = "kv.score" in names
    parts = ("kv.refine", "kv.budget", "kv.keep", "kv.when")
    return {n: t for n, t in tables.items() if n not in names and not (eviction and n in parts)}


def _named(axis: str, table: dict[str, Any], reason: str) -> bool:
    """Whether a refusal speaks of a table."""
    words = reason.lower()
    spoken = {axis, str(table.get("use")), str(table.get("use")).replace("-", "")}
    return any(word in words for word in spoken)


def _others(axis: Axis, table: dict[str, Any]) -> list[tuple[tuple[bool, bool, int], str]]:
    """The axis' other methods, near names first, and how far each is: another grade, a part that is to be trained, and
    how much that it declares differs.
    """
    used = str(table["use"])
    names = [n for n in axis.names() if n != used]
    near = difflib.get_close_matches(used, names, n=max(1, len(names)), cutoff=0.0)
    try:
        own = axis.build(used, **_options(table))
    except RecipeError:  # no such method, or an option out of range
        return [((False, False, 0), name) for name in near]

    def far(other: Method) -> tuple[bool, bool, int]:
        grades = [getattr(method, "grade", "") for method in (own, other)]
        differ = len(_declared(own) ^ _declared(other))
        return grades[0] != grades[1], isinstance(other, Trained | TableMethod), differ

    return [(far(axis.build(name)), name) for name in near]


def _options(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "use"}


def _declared(method: Method) -> frozenset[tuple[str, str]]:
    """What a method declares."""
    sets = {"relies": method.relies, "breaks": method.breaks, "provides": method.provides}
    return frozenset((kind, one.name) for kind, found in sets.items() for one in found)
