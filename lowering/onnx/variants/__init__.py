"""Variants of an entry: other ways to lower an operator, tried before the portable one.

A file is a variant, its `lower` a table whose name it is. A rule takes what the portable one takes,
and gives NotImplemented for a form that it cannot compute, which is then lowered portably. Inputs,
outputs, state and weights of all variants are the same.
"""

from __future__ import annotations

import importlib
import pkgutil

from accel.lowering import Table

PORTABLE = (
    "grouped"  # today's lowering of attention; always there, and what the others stand beside
)
NATIVE = "native"  # accel's own operators


def variants() -> list[Table]:
    """The table of every file beside this one, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").lower for name in names]
