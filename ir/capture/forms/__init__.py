"""Forms: how a kind of module computes when its own code cannot be exported.

A file of this folder is a family of modules. Its `FORMS` maps the class name of a module to the
function that takes the place of its `forward` while the model is exported; `CLASS.method` names
another method, and `.method` that of every module which has one. Its `FUNCTIONS` maps the name of a function
to the one that takes its place in the Python file of any module. Forms are written with the operators of
accel.ir.ops. The captured program is checked against the module's own code, so a form that
computes something else is found at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

CHUNK = 32  # tokens: more than any call of the check


@dataclass(frozen=True)
class Form:
    """A method of a module that is computed by another function while the model is exported."""

    module: str  # its path in the model
    method: str
    function: Callable[..., Any]


def forms_of(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of a module that have forms, and these."""
    for key, form in _known().items():
        kind, _, method = key.partition(".")
        name = method or "forward"
        needed = (name, *getattr(form, "needed", ()))
        if kind in ("", type(module).__name__) and all(hasattr(module, n) for n in needed):
            yield name, form


def needs(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A form of modules that have these attributes: other versions of a class compute in another way."""

    def mark(form: Callable[..., Any]) -> Callable[..., Any]:
        vars(form)["needed"] = names
        return form

    return mark


def is_chunked(module: nn.Module) -> bool:
    """Whether a module's own code works in chunks of tokens."""
    return type(module).__name__ in _known() and hasattr(module, "chunk_size")


@contextlib.contextmanager
def forms(model: nn.Module, chosen: Iterable[Form]) -> Iterator[None]:
    """Modules compute by the forms that were chosen for them, and their files by the functions that have forms."""
    changed: list[tuple[nn.Module, str]] = []
    names = {type(m).__module__ for m in model.modules()}
    files = {name: vars(sys.modules[name]) for name in names if name in sys.modules}
    before = [(file, n, file[n]) for file in files.values() for n in _functions() if n in file]
    try:
        for file, name, _ in before:
            file[name] = _functions()[name]
        for form in chosen:
            module = model.get_submodule(form.module)
            vars(module)[form.method] = MethodType(form.function, module)
            changed.append((module, form.method))
        yield
    finally:
        for module, name in changed:
            vars(module).pop(name, None)
        for file, name, function in before:
            file[name] = function


@contextlib.contextmanager
def short_chunks(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Modules (by path) whose own code works in chunks of tokens use short ones, each one call of the check.

    Mamba-2 pads every call to a whole chunk and takes memory by its square; the result is the same.
    """
    chunked = [model.get_submodule(path) for path in paths]
    before = [m.chunk_size for m in chunked]
    try:
        for module in chunked:
            vars(module)["chunk_size"] = CHUNK
        yield
    finally:
        for module, size in zip(chunked, before, strict=True):
            vars(module)["chunk_size"] = size


@functools.cache
def _known() -> dict[str, Callable[..., Any]]:
    """The forms of all files in this folder."""
    return _of_files("FORMS")


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """The functions that have forms, by name."""
    return _of_files("FUNCTIONS")


def _of_files(table: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for file in pkgutil.iter_modules(__path__):
        found |= getattr(importlib.import_module(f"{__name__}.{file.name}"), table, {})
    return found
