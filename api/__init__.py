"""accel: a compiler for language-model inference.

    compiled = accel.optimize(model, "base")
    compiled.generate("def quicksort(")
    compiled.save("artifact/")
    compiled = accel.load("artifact/")

`load` and what it returns need neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel.ir.errors import (
        AccelError,
        ArtifactError,
        CaptureError,
        InputError,
        LoweringError,
        PassError,
        RecipeError,
    )
    from accel.ir.recipe import Recipe
    from accel.runtime.compiled import CompiledModel, Output, load
    from accel.runtime.optimize import optimize
    from accel.runtime.session import Session
    from accel.runtime.smoke import Smoke, smoke
    from accel.runtime.version import VERSION as __version__

_WHERE = {
    "optimize": "accel.runtime.optimize",
    "load": "accel.runtime.compiled",
    "CompiledModel": "accel.runtime.compiled",
    "Output": "accel.runtime.compiled",
    "Session": "accel.runtime.session",
    "Recipe": "accel.ir.recipe",
    "Smoke": "accel.runtime.smoke",
    "smoke": "accel.runtime.smoke",
    **dict.fromkeys(
        ("AccelError", "ArtifactError", "CaptureError", "InputError", "LoweringError", "PassError", "RecipeError"),
        "accel.ir.errors",
    ),
}  # fmt: skip

__all__ = [
    "AccelError", "ArtifactError", "CaptureError", "CompiledModel", "InputError", "LoweringError",
    "Output", "PassError", "Recipe", "RecipeError", "Session", "Smoke",
    "__version__", "load", "optimize", "smoke",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("accel.runtime.version").VERSION
    if name not in _WHERE:
        raise AttributeError(f"module 'accel' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
