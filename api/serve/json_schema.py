"""Whether a JSON schema is one: its keywords hold what they may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accel.ir.errors import shown

DEEPEST = 32
MOST = 2000  # schemas within one

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_ONE = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def check_schema(schema: Any) -> None:
    """Raise ValueError, with the place, where it is none, or is too deep or large."""
    left = [("it", schema, 0)]
    seen = 0
    while left:
        place, one, depth = left.pop()
        seen += 1
        if seen > MOST or depth > DEEPEST:
            limit = f"{MOST} schemas" if seen > MOST else f"{DEEPEST} levels"
            raise ValueError(f"it has more than {limit}")
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise ValueError(f"{place} is {shown(one)}, neither an object nor true or false")
        _check_values(place, one)
        left += [(f"{place}.{name}", inner, depth + 1) for name, inner in _inner(place, one)]


def _check_values(place: str, schema: Mapping[str, Any]) -> None:
    for key, (holds, told) in _RULES.items():
        if key in schema and not holds(schema[key]):
            raise ValueError(f"{place}.{key} is {shown(schema[key])}; give {told}")


def _inner(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _ONE:
        value = schema.get(key, True)
        if key == "items" and isinstance(value, list):
            yield from ((f"{key}[{i}]", one) for i, one in enumerate(value))
        else:
            yield key, value
    for key in _LISTS:
        value = schema.get(key, [])
        if not isinstance(value, list) or (key in schema and not value):
            raise ValueError(f"{place}.{key} is {shown(value)}; give a list of schemas")
        yield from ((f"{key}[{i}]", one) for i, one in enumerate(value))
    for key in _NAMED:
        value = schema.get(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{place}.{key} is {shown(value)}; give an object of schemas")
        yield from ((f"{key}.{name:.40}", one) for name, one in value.items())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(one, str) and one in TYPES for one in names)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_Rule = tuple[Callable[[Any], bool], str]
_RULES: dict[str, _Rule] = {
    "type": (_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "required": (_texts, "a list of names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    **dict.fromkeys(("$ref", "pattern", "format"), (lambda v: isinstance(v, str), "text")),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        (_number, "a number"),
    ),
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(
        (
            *("minLength", "maxLength", "minItems", "maxItems"),
            *("minProperties", "maxProperties", "minContains", "maxContains"),
        ),
        (_count, "a whole number from 0"),
    ),
}
