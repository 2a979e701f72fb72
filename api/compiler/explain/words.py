"""What a method says of itself: its docstrings, its options with their values and defaults, its grade."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from accel.ir.axis import ranges


def about(method: Any) -> str:
    """The first paragraph of the method's module, or else of its class."""
    module = inspect.getmodule(type(method))
    text = inspect.getdoc(module) or inspect.getdoc(type(method)) or ""
    return " ".join(text.split("\n\n")[0].split())


def docstrings(kind: type[Any]) -> str:
    """All that a class of a method and its module say of themselves."""
    module = inspect.getdoc(inspect.getmodule(kind)) or ""
    return f"{module}\n\n{inspect.cleandoc(kind.__dict__.get('__doc__') or '')}"


def details(method: Any) -> str:
    """The whole docstring of the method's own class; "" where it has none beside its module's."""
    text = inspect.cleandoc(type(method).__dict__.get("__doc__") or "")
    made = text.startswith(
        f"{type(method).__name__}("
    )  # dataclasses write a signature where nothing is
    return "" if made else " ".join(text.split())


def options(method: Any, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """Every option of a method that its table may set: its default, its value in this recipe, and its range in words,
    "" where it has none.
    """
    allowed = ranges(type(method))
    found = []
    for field in (f for f in dataclasses.fields(method) if f.init):
        if field.name in method.by_request:
            continue
        default = field.default
        if default is dataclasses.MISSING:
            made = field.default_factory
            default = made() if made is not dataclasses.MISSING else None
        found.append({
            "name": field.name,
            "value": getattr(method, field.name),
            "default": default,
            "type": str(field.type),
            "range": str(allowed[field.name] or ""),
            "set": field.name in chosen,
        })  # fmt: skip
    return found
