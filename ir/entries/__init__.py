"""The kinds of entries that a program may have: a file is a kind. No torch is imported until an example is made."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ir.facts import Facts


@dataclass(frozen=True)
class EntryKind:
    """What every layer below knows of an entry beside its graph. A file holds one subclass, and one object of it.

    threads: most compute threads that a call is worth; None: all.
    in_place: it writes the state that it gives where the state lies; otherwise it gives new buffers.
    variants: its graph is also written for other kernels.
    error: how far its lowered graph may be from its reference, relative to the largest value of each output;
    None: it is not compared.
    rounds: products and the cache may round in it, which allows for more (`passes.check.codes_slack`).
    chooses: rounding may then turn a choice that it makes.
    feature: the part of the facts that it comes with.
    """

    name: str
    threads: int | None = None
    in_place: bool = True
    variants: bool = False
    error: float | None = 1e-3
    rounds: bool = False
    chooses: bool = False
    feature: str = ""

    def names(self, facts: Facts) -> Sequence[str]:
        """The entries of this kind that a model with these facts has, where a `feature` decides it."""
        return [self.name] if getattr(facts, self.feature) is not None else []

    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Inputs for a program's entry of this kind, by name: the same at each call. `name`: which entry."""
        raise NotImplementedError


@cache
def kinds() -> dict[str, EntryKind]:
    """Every kind, by name."""
    found: dict[str, EntryKind] = {}
    for file in pkgutil.iter_modules(__path__):
        if not file.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{file.name}")
            found |= {k.name: k for k in vars(module).values() if isinstance(k, EntryKind)}
    return found


def kind_of(entry: str) -> EntryKind | None:
    """The kind of an entry `name` or `name.<number>`; None: this version knows none such."""
    return kinds().get(entry.partition(".")[0])
