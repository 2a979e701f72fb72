"""What llguidance would take of a JSON schema without holding text to it, and so is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from accel.ir.errors import InputError, shown

EXACT = (1 << 53) - 1  # llguidance computes in float64: beyond it an integer becomes its neighbour
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LOWER, _UPPER = "inimum", "aximum"  # how those of a side end
_BOUNDS = (*_RANGE, "multipleOf")
_VALUES = ("const", "enum")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = ("default", "examples")
_End = tuple[str, float]  # a keyword and its number
# options of llguidance. Without \\u a name of a property has one spelling: an escape would make it an additional one,
# which other schemas hold. Nothing of a schema is left out (`lenient`)
OPTIONS = {"json_allowed_escapes": 'nrbtf\\"', "lenient": False}


def check_schema(schema: Any) -> None:
    """Raise InputError for a keyword, wherever it is, that llguidance would not hold text to."""
    schemas = list(_schemas(schema))
    for one in schemas:
        for keyword in (*_BOUNDS, *_VALUES):
            for number in _numbers(one.get(keyword)):
                if abs(number) > EXACT:
                    raise _refused(
                        f"{keyword} has {shown(number)}, and integers beyond ±(2^53 - 1) are not compared exactly",
                        "give smaller ones, or a pattern of a string",
                    )
        least, needed = one.get("minProperties"), one.get("required")
        names = len(set(map(str, needed))) if isinstance(needed, list) else 0
        if isinstance(least, int | float) and least > max(1, names):
            raise _refused(
                f"minProperties is {shown(least)}, and a name that is written twice would count twice",
                "name as many properties in required",
            )
    _check_ranges(schemas)


def _check_ranges(schemas: Sequence[Mapping[str, Any]]) -> None:
    """llguidance takes a whole number that is excluded, where a bound on the other side is less than 1 away. The bounds
    of one schema meet; those of all do where some hold at the same time (allOf, a reference beside others).
    """
    together = any(map(_meets, schemas))
    everywhere = _Ends(end for one in schemas for end in _bounds(one)) if together else None
    for one in schemas:
        if one.get("type") == "integer" and not together:
            continue
        own = list(_bounds(one))
        ends = everywhere or _Ends(own)
        for keyword, bound in own:
            near = ends.opposite(keyword, bound)
            if near is not None:
                raise _refused(
                    f"{keyword} = {shown(bound)} beside {near[0]} = {shown(near[1])} does not exclude {shown(bound)}",
                    "give bounds that are 1 apart, or a pattern of a string",
                )


def _meets(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas hold for one value."""
    every = schema.get("allOf")
    parts = len(every) if isinstance(every, list) else 0
    parts += sum(keyword in schema for keyword in ("anyOf", "oneOf", "$ref"))
    return parts + any(True for _ in _bounds(schema)) > 1


def _bounds(schema: Mapping[str, Any]) -> Iterator[_End]:
    for keyword in _RANGE:
        number = schema.get(keyword)
        if isinstance(number, int | float) and not isinstance(number, bool):
            yield keyword, number


class _Ends:
    """Bounds, by the whole numbers that are less than 1 away."""

    def __init__(self, ends: Iterable[_End]):
        self._near = {
            (keyword[-len(_LOWER) :], whole): (keyword, end)
            for keyword, end in ends
            for whole in (math.floor(end), math.ceil(end))
        }

    def opposite(self, keyword: str, bound: float) -> _End | None:
        """One on the other side of a whole number that is excluded."""
        if not keyword.startswith("exclusive") or bound != math.floor(bound):
            return None
        return self._near.get((_UPPER if keyword.endswith(_LOWER) else _LOWER, math.floor(bound)))


def _refused(what: str, act: str) -> InputError:
    return InputError(f"structured_outputs: json is not valid: {what}; {act}")


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """It and all in it; what a keyword that is not known holds may be one that a reference names."""
    left: list[tuple[Any, bool]] = [(schema, False)]  # whether its keys are names
    while left:
        value, names = left.pop()
        if isinstance(value, list):
            left += [(one, False) for one in value]
        elif isinstance(value, dict) and names:
            left += [(one, False) for one in value.values()]
        elif isinstance(value, dict):
            yield value
            left += [
                (one, keyword in _NAMED)
                for keyword, one in value.items()
                if keyword not in (*_VALUES, *_NOTES)
            ]


def _numbers(value: Any) -> Iterator[int | float]:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield one
