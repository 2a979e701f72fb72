"""One operator of the dialect: schema, slow exact reference, shape function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

REFERENCES: dict[Any, Callable[..., Any]] = {}  # overload -> what computes it, with gradients
LIBRARY = torch.library.Library("accel", "DEF")


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
