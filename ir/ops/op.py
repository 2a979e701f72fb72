"""One operator of the dialect: schema, slow exact reference, shape function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

_REQUIRED = object()
REFERENCES: dict[Any, Callable[..., Any]] = {}  # overload -> what computes it, with gradients
LIBRARY = torch.library.Library("accel", "DEF")


@cache
def _argument(target: Any, name: str) -> tuple[int, Any]:
    """Place and default of an operand. Raises ValueError where the schema has none of that name."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return place, argument.default_value if argument.has_default_value() else _REQUIRED
    raise ValueError(f"{target} has no operand {name}")


def operand_of(node: fx.Node, name: str) -> Any:
    """What a call is given for an operand, by its name in the operator's schema; else the default."""
    place, default = _argument(node.target, name)
    if place < len(node.args):
        return node.args[place]
    value = node.kwargs.get(name, default)
    if value is _REQUIRED:
        raise ValueError(f"{node.name} is given no {name}")
    return value


def set_operand(node: fx.Node, name: str, value: Any) -> None:
    """Give a call another operand, by its name in the operator's schema."""
    place, _ = _argument(node.target, name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


@dataclass(frozen=True)
class Op:
    """`accel::<name>`, callable like any torch operator; `.default` is the FX target.

    The reference is run as it stands: it is the oracle that every lowering is tested against.
    """

    name: str
    schema: str
    reference: Callable[..., Any] = field(repr=False)
    shape: Callable[..., Any] = field(repr=False)

    def __post_init__(self) -> None:
        LIBRARY.define(self.name + self.schema)
        LIBRARY.impl(self.name, self.reference, "CompositeExplicitAutograd")
        REFERENCES[self.default] = self.reference
        torch.library.register_fake(f"accel::{self.name}", self.shape, lib=LIBRARY)

    @property
    def default(self) -> torch._ops.OpOverload:
        """The overload that stands in a graph."""
        overload: torch._ops.OpOverload = getattr(torch.ops.accel, self.name).default
        return overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.default(*args, **kwargs)
