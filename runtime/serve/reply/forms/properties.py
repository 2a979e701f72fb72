"""For forms that write each argument apart, so that a schema is held to property by property."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.ir.errors import InputError
from accel.runtime.serve.reply.forms import Tool, literal

_OF_ALL = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"),
    *("title", "description"),
}


@dataclass(frozen=True)
class Property:
    """An argument. `schema`: with the definitions that it may refer to."""

    name: str
    schema: Any
    required: bool


def properties_of(tool: Tool) -> list[Property]:
    """The arguments of a tool, those that are required first. Raises InputError where the schema says more than one
    schema for each does.
    """
    needed, known = tool.schema.get("required", []), tool.schema.get("properties", {})
    if wrong := sorted({*tool.schema} - _OF_ALL) + sorted({*needed} - {*known}):
        raise InputError(
            f"{tool.name}: {wrong[0]!r:.80} cannot be held to by this model's calls, which write each property "
            "apart; give properties and required only"
        )
    rest = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
    found = [
        Property(
            name,
            {**schema, **rest} if isinstance(schema, Mapping) and not is_text(schema) else schema,
            name in needed,
        )
        for name, schema in known.items()
    ]
    return sorted(found, key=lambda one: not one.required)


def listed(rules: Sequence[str], needed: int, comma: str) -> str:
    """The right side of a rule for things that a comma stands between, in their order; those behind the first `needed`
    may be missing.
    """
    between = literal(comma)
    body = between.join(f" {rule} " for rule in rules[:needed])
    rest = [f"({between} {rule})?" for rule in rules[needed:]]
    if needed or not rest:
        return body + " ".join(rest)
    firsts = [
        f"{rules[i]} {' '.join(rest[i + 1 :])}" for i in range(len(rest))
    ]  # any may be the first
    return f"({' | '.join(firsts)})?"


def is_text(schema: Any) -> bool:
    """Whether a schema says that a value is a string, in so many words."""
    if not isinstance(schema, Mapping):
        return False
    values = values_of(schema)
    if values is not None:
        return all(isinstance(value, str) for value in values)
    return bool(schema.get("type") == "string")


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema lets be."""
    found: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found
