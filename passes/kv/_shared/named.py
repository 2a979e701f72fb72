"""Functions whose parameters name what they read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def parameters(method: Callable[..., Any]) -> list[str]:
    """The names that a method's function asks for."""
    return list(inspect.signature(method).parameters)


def call(method: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """A method of the values that it names."""
    return method(**{name: values[name] for name in parameters(method)})
