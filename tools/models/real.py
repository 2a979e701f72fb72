"""Fetch models that people know, for measurements and tests, into the user's cache.

    python tools/models/real.py smollm2-135m                    print its path; fetch it where it is not there
    python tools/models/real.py gemma3-270m minilm              some
    python tools/models/real.py qwen-coder-0.5b --path FILE     take a file of yours
    python tools/models/real.py --list                          all, with sizes and licences

They are those of the package (accel.compiler.load.fetch, which fetches them) and of `real.toml`. A model lies in
~/.cache/accel/models/NAME ($XDG_CACHE_HOME).
"""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from accel.cli import error_text
from accel.commands import console
from accel.compiler.load.fetch.models import OWN, Model, fetch, read_models
from accel.ir.errors import AccelError, InputError, unknown

_COMMAND = "python tools/models/real.py"


@cache
def models() -> dict[str, Model]:
    """All of them, by name."""
    tables = (OWN, Path(__file__).with_suffix(".toml"))
    return {n: m for table in tables for n, m in read_models(table, f"{_COMMAND} {{name}}").items()}


def find(name: str) -> Model:
    """Raises InputError with the near name."""
    if name not in models():
        raise InputError(unknown("model", name, models()))
    return models()[name]


def path(name: str) -> Path:
    """Where a fetched model lies: its file, or its folder. Raises InputError with the command that fetches it."""
    model = find(name)
    if not model.complete:
        size = console.size(model.size)
        what = f"fetches it ({size})" if model.packages else f"takes a copy of it ({size})"
        raise InputError(f"{name} is not in accel's cache; this {what}: {model.command}")
    return model.place


def _list() -> None:
    rows = [
        (m.name, m.what, m.licence, console.size(m.size), m.use, "yes" if m.complete else "")
        for m in models().values()
    ]
    console.table(("name", "what", "licence", ">size", "for", "here"), rows)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="See --list.")] = None,
    given: Annotated[
        Path | None, typer.Option("--path", help="The file of a model that has no packages.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show all, and fetch nothing.")] = False,
) -> None:
    """Print the path of each model; fetch those that are not in the cache."""
    if listed:
        return _list()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not names:
            raise InputError(f"name a model: {', '.join(models())}; {_COMMAND} --list shows them")
        if given is not None and len(names) > 1:
            raise InputError("--path is the file of one model; name only that one")
        for model in [find(name) for name in names]:
            with console.fetching(model) as watch:
                place = fetch(model, given, watch)
            typer.echo(place)
    except (AccelError, OSError) as error:
        raise SystemExit(f"real: {error_text(error)[0]}") from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on where it stopped", err=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    typer.run(main)
