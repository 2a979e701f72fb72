"""What `run` is given: an artifact, or a model directory that is compiled for the occasion."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.commands.console import progress
from accel.ir.errors import InputError

if TYPE_CHECKING:
    from accel.runtime.model.compiled import CompiledModel


def open_model(
    path: Path, *, threads: int | None = None, kernels: str = "auto", **build: Any
) -> CompiledModel:
    """The compiled model at a path; `build` holds options of `optimize` for a model directory.

    Raises:
        AccelError: it is neither, or cannot be opened or compiled.
    """
    from accel.runtime.model.compiled import load

    if not path.exists():
        raise InputError(_missing(path))
    if (path / "config.json").is_file() and not (path / "accel.json").is_file():
        with progress("compile") as watch:
            from accel.compiler.optimize import optimize

            return optimize(path, progress=watch, threads=threads, **build)
    return load(path, threads=threads, kernels=kernels)


def _missing(path: Path) -> str:
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"{path} does not exist; did you mean {path.parent / near[0]}?"
    return (
        f"{path} does not exist; give an artifact (accel-compile build MODEL --out DIR makes one) "
        "or a model directory"
    )
