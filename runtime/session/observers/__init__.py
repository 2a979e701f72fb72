"""What has to follow a session's calls: a file is an observer, found by listing this folder. No registry to edit."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from accel.runtime.session.observers.observer import ModelParts, ObserverFactory, SessionObserver


def observer_factories(model: ModelParts) -> tuple[ObserverFactory, ...]:
    """One for each observer that the model's sessions need, by their `order`. Raises RecipeError."""
    made = (kind.for_model(model) for kind in observer_classes())
    return tuple(factory for factory in made if factory is not None)


@cache
def observer_classes() -> tuple[type[SessionObserver], ...]:
    """All of this folder, by their `order`; a file that starts with an underscore has none."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    found = [
        kind
        for module in (importlib.import_module(f"{__name__}.{name}") for name in names)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, SessionObserver)
        and kind is not SessionObserver
        and kind.__module__ == module.__name__
    ]
    return tuple(sorted(found, key=lambda kind: kind.order))
