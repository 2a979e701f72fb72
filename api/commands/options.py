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
        help="Recipe name or TOML file (default: base). Repeat it to merge recipes.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="tokenizer.json, or the folder that holds it. Default: the one in the model directory.",
    ),
]
MaxContext = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Maximum sequence length in tokens (at most the model's own limit).",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Allow Python code from the model directory to run."),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        help="Let huggingface_hub download what the Hugging Face cache lacks of the repository MODEL.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Compute threads. Default: OMP_NUM_THREADS, or the number of physical cores.",
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        metavar="auto|NAME",
        help="Kernel variant (listed by inspect). Default: auto, the fastest measured on this machine.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def recipe(given: list[str] | None) -> str | list[str]:
    """What `optimize` takes, out of the --recipe options; "base" where there are none."""
    names = given or ["base"]
    return names[0] if len(names) == 1 else names
