"""Make of a GGUF file the folder of floats that transformers and accel read.

python tools/models/floats.py smollm2-135m                       in the cache, beside the model
python tools/models/floats.py FILE.gguf --out FOLDER --dtype bfloat16
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import real
import torch
import typer

from accel.cli import error_text
from accel.commands import console
from accel.compiler.load.fetch.models import alone
from accel.compiler.load.floats import Watch, write
from accel.compiler.load.gguf._file import is_gguf
from accel.ir.errors import AccelError, InputError


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def folder(
    name: str, dtype: Dtype = Dtype.float32, watch: Watch = lambda done, total: None
) -> Path:
    """The float folder of a fetched model of `real.toml`, in the cache; made where it is not there.

    Raises InputError with the command that fetches the model, and what `write` raises.
    """
    model, file = real.find(name), real.path(name)
    place = model.sibling(f".{dtype}")
    if file.suffix != ".gguf":
        raise InputError(f"{name} is no GGUF file, but {model.what}")
    with alone(model, lambda what, count: None):
        if not place.exists():
            write(file, place, getattr(torch, dtype), watch)
    return place


def main(
    model: Annotated[str, typer.Argument(help="A name of real.py, or a GGUF file.")],
    out: Annotated[Path | None, typer.Option(help="By default in the cache.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.float32,
) -> None:
    """Write a model as a folder of floats, and print its path."""
    file = Path(model) if is_gguf(Path(model)) else None
    try:
        with console.paced(file.name if file else model) as tell:

            def watch(done: int, total: int) -> None:
                tell(f"writing {console.size(total)} of weights", done / total)

            if file and out is None:
                raise InputError(f"name the folder to write {file.name} to, as --out FOLDER")
            if out is None:
                out = folder(model, dtype, watch)
            else:
                write(file or real.path(model), out, getattr(torch, dtype), watch)
    except (AccelError, OSError) as error:
        raise SystemExit(f"floats: {error_text(error)[0]}") from None
    typer.echo(out)


if __name__ == "__main__":
    typer.run(main)
