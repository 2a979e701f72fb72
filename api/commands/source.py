"""What `run` and `chat` are given: an artifact, or a model that is compiled for the occasion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from accel.commands import options
from accel.commands.console import progress
from accel.ir.errors import CaptureError, InputError, extra
from accel.ir.fields import MANIFEST
from accel.runtime.inputs.tokenizer_config import TOKENIZER, TokenizerConfig

if TYPE_CHECKING:
    from accel.runtime.model.compiled import CompiledModel


def open_model(
    path: Path,
    context: typer.Context,
    *,
    check: Callable[[TokenizerConfig], None] = lambda _: None,
    threads: int | None = None,
    kernels: str = "auto",
    public_key: Path | None = None,
    **build: Any,
) -> CompiledModel:
    """The compiled model at a path; `build` holds options of `optimize` for a model.

    `check`: of what lies beside its tokenizer, before it is opened or compiled. `context`: of the command; an option
    that was typed and cannot apply to what the path holds is an error.

    Raises:
        AccelError: it is neither, or cannot be opened or compiled.
    """
    from accel.runtime.artifact.workspace import put_back
    from accel.runtime.model.load import load

    asked = {
        name
        for name in (*build, "kernels", "adapter", "public_key")
        if options.was_given(context, name)
    }
    put_back(path.resolve())
    if not path.exists():
        path = _named(path, bool(build.get("download")))
    if kind := _model(path):
        if "adapter" in asked:
            raise InputError(
                f"--adapter chooses among the adapters of an artifact, and {path} is a {kind}; merge one "
                f"for this run (--merge-adapter DIR), or build first: accel-compile build {path} --adapter NAME=DIR "
                "--out DIR"
            )
        if "public_key" in asked:
            raise InputError(
                f"--public-key checks an artifact, and {path} is a {kind}; leave it out, or build and sign "
                f"first: accel-compile build {path} --out DIR, then accel-compile sign DIR --key KEY"
            )
        if "kernels" in asked:
            raise InputError(
                f"--kernels chooses among the kernels of an artifact, and {path} is a {kind}; leave it "
                f"out, or build first: accel-compile build {path} --out DIR"
            )
        with extra("compile"):
            from accel.compiler.load.source import open_source, tokenizer_of
            from accel.compiler.optimize import optimize
        tokenizer = tokenizer_of(build.get("tokenizer"), open_source(path))
        if tokenizer is not None:
            check(tokenizer.config)
        with progress("compile") as watch:
            return optimize(path, progress=watch, threads=threads, **build)
    if wrong := [name for name in build if name in asked]:
        option = "--" + wrong[0].replace("_", "-")
        raise InputError(
            f"{option} applies when a model is built, and {path} is an artifact; leave it out, or build again: "
            f"accel-compile build MODEL --out DIR {option} …"
        )
    if (path / TOKENIZER).is_file():
        try:
            check(TokenizerConfig.read(path))
        except InputError:
            raise
        except ValueError:
            pass  # which `load` tells, after it has checked the files
    return load(path, threads=threads, kernels=kernels, public_key=public_key)


def _model(path: Path) -> str:
    """What a model is that a path holds; "": none, so that it should be an artifact."""
    if path.is_file():  # told here as the compiler tells it, which brings torch
        with path.open("rb") as file:
            return "GGUF file" if path.suffix == ".gguf" or file.read(4) == b"GGUF" else ""
    there = (path / "config.json").is_file() and not (path / MANIFEST).is_file()
    return "model directory" if there else ""


def _named(path: Path, download: bool) -> Path:
    """The folder of a repository in the Hugging Face cache. Raises InputError with what is near."""
    from accel.compiler.load.hub import model_folder, near_beside

    near = near_beside(path, MANIFEST)
    if near is not None and not download:
        raise InputError(f"{path} does not exist; did you mean {near}?")
    try:
        with extra("compile"):
            return model_folder(path, download)
    except CaptureError as error:
        raise InputError(
            f"{error}, or give an artifact (accel-compile build MODEL --out DIR makes one)"
        ) from error
