"""For a recipe that is refused: the smallest change of it that is accepted, found by trying."""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from accel.ir.axis import Axis, find_axes
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe

SECONDS = 30.0  # spent on trying, at most about this
Tables = dict[str, dict[str, Any]]
Try = Callable[[Recipe], None]  # raises AccelError where a recipe is refused


@dataclass(frozen=True)
class Nearest:
    """The recipe that works, and what was changed; None where none of those `tried` does."""

    recipe: Recipe | None
    change: str
    tried: int


def nearest(
    recipe: Recipe, reason: str, attempt: Try, watch: Callable[[str], None], options: bool = False
) -> Nearest:
    """Try smaller changes before larger ones, and first those of what the refusal names.

    options: whether an option's value is what was refused.
    """
    end, tried = time.perf_counter() + SECONDS, 0
    for tables, change in _candidates(recipe, reason, options):
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


def _candidates(recipe: Recipe, reason: str, options: bool) -> Iterator[tuple[Tables, str]]:
    """Options at their defaults; one table less; another method in its place; two tables less."""
    axes = find_axes()
    known = {n: t for n, t in recipe.tables.items() if n in axes}
    if len(known) < len(recipe.tables):
        gone = ", ".join(f"[{n}]" for n in recipe.tables if n not in known)
        yield known, f"without {gone}"
    order = sorted(known, key=lambda name: not _named(name, known[name], reason))
    plain = [
        ({**known, name: {"use": use}}, f"with the default options of {name} {use}")
        for name in order
        if len(known[name]) > 1 and (use := known[name]["use"]) in axes[name].names()
    ]
    if options:
        yield from plain
    for name in order:
        yield _without(known, name), f"without [{name}] {known[name]['use']}"
    if not options:
        yield from plain
    for name in order:
        for other in _others(axes[name], known[name]["use"]):
            yield {**known, name: {"use": other}}, f"with {name} {other} for {known[name]['use']}"
    for pair in itertools.combinations(order, 2):
        yield (
            _without(known, *pair),
            "without " + " and ".join(f"[{n}] {known[n]['use']}" for n in pair),
        )


def _without(tables: Tables, *names: str) -> Tables:
    """The other tables; where a score goes, all that says how it is used goes too."""
    eviction = "kv.score" in names
    parts = ("kv.budget", "kv.keep", "kv.when")
    return {n: t for n, t in tables.items() if n not in names and not (eviction and n in parts)}


def _named(axis: str, table: dict[str, Any], reason: str) -> bool:
    """Whether a refusal speaks of a table."""
    words = reason.lower()
    spoken = {axis, str(table.get("use")), str(table.get("use")).replace("-", "")}
    return any(word in words for word in spoken)


def _others(axis: Axis, used: str) -> list[str]:
    """The axis' other methods, near names first."""
    names = [n for n in axis.names() if n != used]
    return difflib.get_close_matches(used, names, n=max(1, len(names)), cutoff=0.0)
