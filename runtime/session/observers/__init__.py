"""What follows a session: a file of `runtime/session/{state,prompt,modes}` is an observer. No registry to edit."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from accel.runtime.session.observers.observer import ModelParts, ObserverFactory, SessionObserver

PACKAGES = ("state", "prompt", "modes")  # packages of runtime/session


def observer_factories(model: ModelParts) -> tuple[ObserverFactory, ...]:
    """One for each observer that the model's sessions need, by their `order`. Raises RecipeError."""
    made = (kind.for_model(model) for kind in observer_classes())
    return tuple(factory for factory in made if factory is not None)


@cache
def observer_classes() -> tuple[type[SessionObserver], ...]:
    """All of those folders, by their `order`; a file that starts with an underscore has none."""
    found = [
        kind
        for room in PACKAGES
        for module in _modules(f"accel.runtime.session.{room}")
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, SessionObserver)
        and kind.__module__ == module.__name__
    ]
    return tuple(sorted(found, key=lambda kind: (kind.order, kind.__module__.rpartition(".")[2])))


def _modules(package: str) -> list[Any]:
    paths = importlib.import_module(package).__path__
    names = sorted(m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_"))
    return [importlib.import_module(f"{package}.{name}") for name in names]
