"""choose: which recipe suits a model on this machine, measured on the user's prompts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accel.commands import options
from accel.commands.console import pairs, print_json, progress, table
from accel.ir.errors import InputError, extra

if TYPE_CHECKING:
    from accel.compiler.choose import Choice

EXAMPLES = """\b
Examples:
  accel-compile choose ./my-model --prompts prompts.jsonl
  accel-compile choose ./my-model --prompts prompts.jsonl --budget 1h --max-context 8192
  accel-compile choose ./my-model --prompts a.txt --prompts b.txt --recipe int4 --recipe kv-int8

A line of prompts.jsonl: {"prompt": "The capital of France is", "answer": "Paris"} (answer is optional)
"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}


@dataclass(frozen=True)
class Build:
    """How each recipe is built."""

    max_context: options.MaxContext = 2048
    tokenizer: options.Tokenizer = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Calibration text for weight quantisation. Default: the bundled text.",
        ),
    ] = None
    threads: options.Threads = None
    trust_remote_code: options.TrustRemoteCode = False
    download: options.Download = False


@options.grouped
def choose(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face model directory, a GGUF file, or the id of a repository in the Hugging Face cache "
            "(org/name).",
        ),
    ],
    *,
    prompts: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Prompts like your own: .jsonl with prompt and optional answer per line, or a text file that "
            "is one prompt. May be repeated.",
        ),
    ],
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time to spend: 90s, 10m or 2h.")
    ] = "10m",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for results and choose.html. A stopped run goes on from there. Default: choose-MODEL.",
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Try only this recipe, and combinations. May be repeated. Default: every recipe.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Number of new tokens per prompt.")
    ] = 32,
    build: Build,
    as_json: options.Json = False,
) -> None:
    """Find the recipes that suit a model, on this machine and your prompts.

    Builds and measures recipes until the budget is spent, first each for a few prompts, then combinations of
    the best, then the better half on more prompts. Shows the Pareto front of speed, memory and loss with the
    command that builds each, and writes choose.html. Results are kept: the same command goes on from them.
    """
    seconds = _budget(budget)
    with extra("compile"):
        from accel.compiler.build_options import BuildOptions
        from accel.compiler.choose import choose as measured
        from accel.compiler.choose import summary
        from accel.compiler.choose.page import write_page

    folder = out or Path(f"choose-{model.resolve().name}")
    with progress("choose") as show:
        found = measured(
            model,
            prompts,
            folder,
            budget=seconds,
            options=BuildOptions(**vars(build)),
            new=tokens,
            recipes=recipe or (),
            progress=show,
        )
    page = folder / "choose.html"
    write_page(page, found)
    print_json(summary.to_json(found, page)) if as_json else _show(found, page)


def _budget(text: str) -> float:
    """Seconds. Raises InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None:
        raise InputError(f"--budget {text!r} is not a time; write 90s, 10m or 2h")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if not seconds > 0:
        raise InputError(f"--budget {text} leaves no time; give at least 1s, such as 10m")
    return seconds


def _show(choice: Choice, page: Path) -> None:
    from accel.compiler.choose import summary

    found = summary.lines(choice)
    head, cells = summary.columns(found, details=False)
    leads = [line for line in found if line.number]
    table(head, [cells(line) for line in leads], title="The front of speed, memory and loss")
    for sentence in summary.basis(choice):
        typer.echo(sentence)
    typer.echo()
    pairs([(question, name) for question, name in summary.picks(found)])
    typer.echo()
    for line in leads:
        typer.echo(f"{line.number}  {line.command}")
    typer.echo()
    pairs([
        *(("note", note) for note in choice.notes),
        *((why, ", ".join(names)) for why, names in summary.off_front(found).items()),
        ("not tried for lack of time", ", ".join(choice.untried)),
        ("to try them", choice.untried and "give the same command again: it goes on from here"),
        ("refused", ", ".join(choice.refused)),
        ("reasons, pictures", page),
    ])  # fmt: skip
