"""Traces that programs of all tests share: a method over operands of the same types and sizes is traced once in a
process, on whatever model. While a test has something replaced, its programs have traces of their own.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from weakref import WeakSet

import pytest
import torch

from accel.ir.program import Program

KEPT = 400  # the last ones that were made
RUNTIME = ("backends", "decode", "model", "serve", "session", "speculation")
BEHIND = (
    *(f"accel.runtime.{name}." for name in RUNTIME),
    *(f"accel.{name}." for name in ("cli", "commands", "ray", "serve")),
)
_made: OrderedDict[Any, Any] = OrderedDict()
_patches: WeakSet[pytest.MonkeyPatch] = WeakSet()


class Traces(dict[Any, Any]):
    """The traces of a program, shared with those of as long a context: symbols have the same range."""

    def __init__(self, context: int):
        super().__init__()
        self.context = context
        self._alone: dict[Any, Any] = {}  # traces of this program that others cannot use

    def __contains__(self, form: object) -> bool:
        if patched():
            return super().__contains__(form)
        return form in self._alone or (self.context, form) in _made

    def __getitem__(self, form: Any) -> Any:
        if patched():
            return super().__getitem__(form)
        return self._alone[form] if form in self._alone else _made[self.context, form]

    def __setitem__(self, form: Any, made: Any) -> None:
        if patched():
            super().__setitem__(form, made)
        elif _sums(made[1]):
            self._alone[form] = made
        else:
            _made[self.context, form] = made
            while len(_made) > KEPT:
                _made.popitem(last=False)


def _sums(operands: Sequence[torch.Tensor]) -> bool:
    """Whether a size is made of several symbols, which no other program has by the same names."""
    sizes = (size for x in operands for size in x.shape if isinstance(size, torch.SymInt))
    return any(not size.node.expr.is_Symbol for size in sizes)


def shared(program: Program) -> Program:
    """The program, over traces that tests share."""
    return replace(program, traces=Traces(program.facts.max_context))


def behind(owner: Any) -> bool:
    """Whether it is of what runs programs, commands or a server: no pass imports these."""
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    return name in ("accel", "sys") or f"{name}.".startswith(BEHIND)


def patched() -> bool:
    """Whether something is replaced now that a program may depend on: not the environment, nor what pytest itself
    holds.
    """
    return any(
        any(not (isinstance(one, pytest.Config) or behind(one)) for one, *_ in patch._setattr)
        or any(place is not os.environ for place, *_ in patch._setitem)
        for patch in _patches
    )


def watch() -> None:
    """See all that tests replace from now on."""
    begin = pytest.MonkeyPatch.__init__

    def begun(self: pytest.MonkeyPatch) -> None:
        begin(self)
        _patches.add(self)

    pytest.MonkeyPatch.__init__ = begun  # type: ignore[method-assign]
