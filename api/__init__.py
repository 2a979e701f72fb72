"""accel: a compiler for language-model inference.

    compiled = accel.optimize(model, "base")
    compiled.generate("def quicksort(")
    compiled.save("artifact/")
    compiled = accel.load("artifact/")

`load` and the models that it returns need neither torch nor transformers; `optimize` and `smoke` need the extra
`compile`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accel.ir.openmp import rest

rest()  # before anything imports torch

if TYPE_CHECKING:
    from accel.compiler.optimize import optimize
    from accel.compiler.smoke.smoke import Smoke, smoke
    from accel.ir.errors import (
        AccelError,
        ArtifactError,
        CaptureError,
        ExtraError,
        InputError,
        LoweringError,
        OutOfMemoryError,
        PassError,
        RecipeError,
        SavedSessionError,
        StorageError,
    )
    from accel.ir.recipe import Recipe
    from accel.ir.version import VERSION as __version__
    from accel.runtime.decode.logprobs import Logprob
    from accel.runtime.decode.sampling_params import SamplingParams
    from accel.runtime.decode.structured_outputs import StructuredOutputsParams
    from accel.runtime.model.chat import Chat
    from accel.runtime.model.compiled import CompiledModel
    from accel.runtime.model.load import load
    from accel.runtime.model.output import Output
    from accel.runtime.session.session import Session

_WHERE = {
    "optimize": "accel.compiler.optimize",
    "load": "accel.runtime.model.load",
    "Chat": "accel.runtime.model.chat",
    "CompiledModel": "accel.runtime.model.compiled",
    "Output": "accel.runtime.model.output",
    "Logprob": "accel.runtime.decode.logprobs",
    "SamplingParams": "accel.runtime.decode.sampling_params",
    "StructuredOutputsParams": "accel.runtime.decode.structured_outputs",
    "Session": "accel.runtime.session.session",
    "Recipe": "accel.ir.recipe",
    "Smoke": "accel.compiler.smoke.smoke",
    "smoke": "accel.compiler.smoke.smoke",
    **dict.fromkeys(
        ("AccelError", "ArtifactError", "CaptureError", "ExtraError", "InputError", "LoweringError",
         "OutOfMemoryError", "PassError", "RecipeError", "SavedSessionError", "StorageError"),
        "accel.ir.errors",
    ),
}  # fmt: skip

__all__ = [
    "AccelError", "ArtifactError", "CaptureError", "Chat", "CompiledModel", "ExtraError", "InputError",
    "Logprob", "LoweringError", "OutOfMemoryError", "Output", "PassError", "Recipe", "RecipeError",
    "SamplingParams", "SavedSessionError", "Session", "Smoke", "StorageError", "StructuredOutputsParams",
    "__version__", "load", "optimize", "smoke",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("accel.ir.version").VERSION
    if name not in _WHERE:
        raise AttributeError(f"module 'accel' has no attribute '{name}'")
    if not _WHERE[name].startswith("accel.compiler."):
        return getattr(importlib.import_module(_WHERE[name]), name)
    from accel.ir.errors import extra

    with extra("compile"):
        return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
