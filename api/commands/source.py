"""What `run` is given: an artifact, or a model directory that is compiled for the occasion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.commands.console import progress
from accel.ir.errors import InputError, unknown

if TYPE_CHECKING:
    from accel.runtime.compiled import CompiledModel


def open_model(path: Path, *, threads: int | None = None, **build: Any) -> CompiledModel:
    """The compiled model at a path; `build` holds options of `optimize` for a model directory.

    Raises:
        AccelError: it is neither, or cannot be opened or compiled.
    """
    import accel

    if not path.exists():
        raise InputError(_missing(path))
    if (path / "config.json").is_file() and not (path / "accel.json").is_file():
        with progress("compile") as watch:
            return accel.optimize(path, progress=watch, **build)
    return accel.load(path, threads=threads)


def _missing(path: Path) -> str:
    here = path.parent if path.parent.is_dir() else None
    near = unknown("folder", path.name, (p.name for p in here.iterdir()) if here else ())
    hint = f" ({near})" if "did you mean" in near else ""
    return (
        f"{path} does not exist{hint}; give an artifact (accel-compile build MODEL --out DIR makes "
        "one) or a model directory"
    )
