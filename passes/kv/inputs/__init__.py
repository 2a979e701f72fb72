"""The named inputs of eviction methods. A file is one input: what it adds to the step, and what the entry
`compress` reads of it. There is no registry.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, fx

from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes.entry_inputs import EntryInputs
from accel.passes.kv._shared.named import call, parameters

__all__ = [
    "EntryInputs",
    "Input",
    "Site",
    "call",
    "every_input",
    "inputs_of",
    "parameters",
    "relied",
]


@dataclass
class Site:
    """One layer's cache, and the attention that reads it.

    `kept_values`: the step's placeholders of what `compress` rewrites, by name. `NAME` is the kept part [B,G,P,…] of a
    value per token, `NAME.recent` the recent part [B,G,C,…]. Where there are `counts`, kept parts are [B,1,M,…]
    (`ir.ops.ragged`).
    """

    layer: int
    node: fx.Node
    kept_values: dict[str, fx.Node] = field(default_factory=dict)

    @property
    def lists(self) -> int:
        """How many lists of kept slots a row has: one of each KV head, or one of all."""
        return int(self.kept_values["pos"].meta["val"].shape[1])


class Input:
    """Parameters that eviction methods may name. Only an input that some method names is built.

    A value per token that the step keeps is put into `site.kept_values` as `NAME` and `NAME.recent`; it then follows
    its token, and methods that name it get [B,G,S,…]. Anything else is read by `placeholders` and `read`.
    """

    names: ClassVar[tuple[str, ...]]  # the parameters
    relies: ClassVar[frozenset[Invariant]] = frozenset()  # of a method that names one
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    marks: ClassVar[tuple[str, ...]] = ()  # inputs of the entry that a session gives
    lasting: ClassVar[bool] = False  # whether they say positions that must not change

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """Change the step: what it keeps, what it gives. `methods`: those of the recipe that evict."""

    def placeholders(
        self, entry: EntryInputs, site: Site, methods: Sequence[Any]
    ) -> dict[str, fx.Node]:
        """A layer's operands, by name, beside `site.kept_values`."""
        return {}

    def read(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, by name, from a layer's operands."""
        return {}


def inputs_of(functions: Sequence[Callable[..., Any]]) -> list[Input]:
    """The inputs that some function names, in the order of their files."""
    wanted = {name for function in functions for name in parameters(function)}
    return [one for one in every_input() if wanted & set(one.names)]


def relied(names: Collection[str]) -> tuple[frozenset[Invariant], frozenset[Invariant]]:
    """What a method of these parameters relies on, and what it breaks."""
    found = [one for one in every_input() if not set(one.names).isdisjoint(names)]
    none: frozenset[Invariant] = frozenset()
    return none.union(*(one.relies for one in found)), none.union(*(one.breaks for one in found))


@cache
def every_input() -> tuple[Input, ...]:
    """One of each file, in their order."""
    found: list[Input] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found += [
            value()
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Input)
            and value.__module__ == module.__name__
        ]
    return tuple(found)
