"""State that a session keeps for each row: declared once, and so selected, joined, copied and saved with it.

    class Counter(Rows):
        count: PerRow                                           # [B]
        seen: Annotated[Ints, ByRow(axis=1, fill=-1)]           # [N,B]

An attribute is an array, a dict of arrays, a list or tuple with an item for each row, or another `Rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from accel.runtime.call import Arrays
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.stack import stacked

_Owner = TypeVar("_Owner")
_Item = TypeVar("_Item", list[Any], tuple[Any, ...])


@dataclass(frozen=True)
class ByRow:
    """How an attribute holds what is of each row.

    axis: that of the rows. fill: what an array is padded with, where those of two sessions differ in size; in front
    along the axes `right`, behind along others. name: in a file, or what names of a dict or of a `Rows` begin with
    (None: its own). saved: False where a call sets it anew.
    """

    axis: int = 0
    fill: float = 0
    right: tuple[int, ...] = ()
    name: str | None = None
    saved: bool = True


@dataclass(frozen=True)
class PerSession:
    """Of an attribute that is one bool or int for all rows."""


PerRow = Annotated[Ints, ByRow()]


class Rows:
    """A value whose attributes are declared by row. `select`, `join` and `copy` give another one."""

    def select(self, rows: Ints) -> Self:
        """Row i is what row rows[i] was, for any number of rows [n]."""
        return _with(self, selected(self, rows))

    def join(self, other: Self) -> Self:
        """With the rows of another one behind these."""
        return _with(self, joined(self, other))

    def copy(self) -> Self:
        """An independent one."""
        return _with(self, copies(self))

    def numbers(self) -> Arrays:
        """All of it, arrays by name, for a file."""
        return numbers_of(self)

    def restored(self, numbers: Arrays) -> Self:
        """The one that gave `numbers`. Raises KeyError."""
        return _with(self, restored(self, numbers))


def values(owner: Any) -> dict[str, Any]:
    """What the attributes of `owner` that are by row are."""
    return {name: getattr(owner, name) for name in by_row(type(owner))}


def selected(owner: Any, rows: Ints) -> dict[str, Any]:
    """What the attributes of `owner` that are by row are of these rows [n]."""

    def of(value: Any, how: ByRow) -> Any:
        if isinstance(value, np.ndarray):
            return np.take(value, rows, axis=how.axis)
        if isinstance(value, dict):
            return {name: of(one, how) for name, one in value.items()}
        return value.select(rows) if isinstance(value, Rows) else _picked(value, rows)

    return {name: of(getattr(owner, name), how) for name, how in by_row(type(owner)).items()}


def joined(owner: Any, other: Any) -> dict[str, Any]:
    """What they are with the rows of `other`, of the same class, behind them."""

    def of(mine: Any, its: Any, how: ByRow) -> Any:
        if isinstance(mine, np.ndarray):
            return stacked(mine, its, fill=how.fill, axis=how.axis, right=how.right)
        if isinstance(mine, dict):
            both = {**its, **mine}
            return {
                name: of(
                    mine.get(name, _empty(like, _size(owner))),
                    its.get(name, _empty(like, _size(other))),
                    how,
                )
                for name, like in both.items()
            }
        return mine.join(its) if isinstance(mine, Rows) else mine + its

    return {
        name: of(getattr(owner, name), getattr(other, name), how)
        for name, how in by_row(type(owner)).items()
    }


def copies(owner: Any) -> dict[str, Any]:
    """The same in memory of its own."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: of(one) for name, one in value.items()}
        return value if isinstance(value, tuple) else value.copy()

    return {name: of(getattr(owner, name)) for name in by_row(type(owner))}


def numbers_of(owner: Any) -> Arrays:
    """All declared attributes but lists and tuples, arrays by name."""
    found: Arrays = {name.strip("_"): np.array(getattr(owner, name)) for name in _whole(owner)}
    for name, how in _saved(owner).items():
        value = getattr(owner, name)
        if isinstance(value, np.ndarray):
            found[_named(name, how)] = value
        elif isinstance(value, dict):
            found |= {f"{_named(name, how, '/')}{key}": array for key, array in value.items()}
        elif isinstance(value, Rows):
            start = _named(name, how, ".")
            found |= {f"{start}{key}": array for key, array in value.numbers().items()}
    return found


def restored(owner: Any, numbers: Arrays) -> dict[str, Any]:
    """The attributes by `numbers_of` another one. Raises KeyError."""
    found: dict[str, Any] = {n: numbers[n.strip("_")].item() for n in _whole(owner)}
    for name, how in _saved(owner).items():
        value = getattr(owner, name)
        if isinstance(value, np.ndarray):
            found[name] = numbers[_named(name, how)]
        elif isinstance(value, dict):
            inside = _under(_named(name, how, "/"), numbers)
            found[name] = {int(key) if key.isdigit() else key: a for key, a in inside.items()}
        elif isinstance(value, Rows):
            found[name] = value.restored(_under(_named(name, how, "."), numbers))
    return found


def by_row(kind: type) -> Mapping[str, ByRow]:
    """The attributes of a class that are declared by row."""
    return declared(kind)[0]


@cache
def declared(kind: Any) -> tuple[dict[str, ByRow], list[str]]:
    """The attributes of a class by row, and those that are whole."""
    hints = get_type_hints(kind, include_extras=True).items()
    told = {n: get_args(hint)[1] for n, hint in hints if get_origin(hint) is Annotated}
    rows = {name: how for name, how in told.items() if isinstance(how, ByRow)}
    return rows, [name for name, how in told.items() if isinstance(how, PerSession)]


def _saved(owner: Any) -> dict[str, ByRow]:
    return {name: how for name, how in by_row(type(owner)).items() if how.saved}


def _whole(owner: Any) -> list[str]:
    return declared(owner.__class__)[1]


def _named(name: str, how: ByRow, end: str = "") -> str:
    return name.strip("_") + end if how.name is None else how.name


def _under(start: str, numbers: Arrays) -> Arrays:
    """Those whose names begin so, without it."""
    return {n.removeprefix(start): array for n, array in numbers.items() if n.startswith(start)}


def _picked(items: _Item, rows: Ints) -> _Item:
    return type(items)(items[row] for row in rows)


def _size(owner: Any) -> int:
    """How many rows there are, by an array of them."""
    arrays = ((getattr(owner, n), how) for n, how in by_row(type(owner)).items())
    return next(int(a.shape[how.axis]) for a, how in arrays if isinstance(a, np.ndarray))


def _empty(like: Any, rows: int) -> Any:
    """As `like` [B,N,…], of other rows, which have nothing."""
    return np.zeros((rows, 0, *like.shape[2:]), like.dtype)


def _with(owner: _Owner, values: Mapping[str, Any]) -> _Owner:
    other = copy(owner)
    vars(other).update(values)
    return other
