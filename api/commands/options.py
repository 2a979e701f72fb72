"""Options that several commands take, described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="A recipe's name or TOML file, default base; give it again to merge more.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="tokenizer.json or its folder; a model directory's own is found."
    ),
]
MaxContext = Annotated[
    int, typer.Option(min=1, metavar="N", help="Longest sequence, up to the model's own limit.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let the model directory run Python code of its own."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Compute threads; default: OMP_NUM_THREADS, or the physical cores."
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        metavar="auto|NAME",
        help="A variant of the step (inspect lists them); default: the fastest here, by measurement.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead.")]


def recipe(given: list[str] | None) -> str | list[str]:
    """What `optimize` takes, out of the --recipe options; "base" where there are none."""
    names = given or ["base"]
    return names[0] if len(names) == 1 else names
