"""Make every page again that says something of the bundled models, and tell what was left to people.

    python tools/pages/all.py                  what was not made of the weights that are bundled now
    python tools/pages/all.py --list           the pages, their commands, and what was made
    python tools/pages/all.py --only drafts    the pages whose path has this in it

Some commands write a page whole. The tables of others stand in blocks, `<!-- python COMMAND -->` to `<!-- end -->`,
into which goes what COMMAND prints, with the day, the processor and the weights. A command that ended well is not run
again for the same weights: what it printed is kept in build/pages, in a folder for each set of weights. Nothing else
should run on the machine: some of it is timed. The text around tables is for people to read again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from blocks import commands, fill
from results import ROOT, folder, weights

from accel.commands.console import table
from accel.runtime.backends.onnx.machine import cpu_name


@dataclass(frozen=True)
class Page:
    """`whole`: its commands write it; else they print its blocks."""

    path: str
    commands: tuple[str, ...]
    whole: bool = True


WHOLE = (
    Page("api/reference/README.md", ("tools/train/reference.py --evaluate",)),
    Page("docs/figures/leaderboard.md", ("tools/pages/leaderboard.py",)),
    Page(
        "docs/figures/speculation.md",
        (
            "tools/bench/bench_speculation.py",
            "tools/bench/bench_speculation.py --page docs/figures",
        ),
    ),
    Page(
        "docs/figures/served.md",
        ("tools/pages/served.py", "tools/pages/served.py --page docs/figures"),
    ),
)


def pages() -> list[Page]:
    """Those that are written whole, then those with blocks."""
    found = ((page, commands(page)) for page in sorted((ROOT / "docs").rglob("*.md")))
    return [
        *WHOLE,
        *(Page(p.relative_to(ROOT).as_posix(), tuple(c), whole=False) for p, c in found if c),
    ]


def printed(command: str) -> Path:
    """The file with what a command printed; it is there once the command ended well."""
    script, *options = shlex.split(command)
    name = "_".join([Path(script).stem, *(o.strip("-").replace("/", ".") for o in options)])
    return folder("pages") / f"{name}.txt"


def run(command: str) -> bool:
    """Run it, show what it prints and keep that; whether it ended well."""
    file = printed(command)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    with (
        part.open("w", encoding="utf-8") as kept,
        subprocess.Popen(
            [sys.executable, *shlex.split(command)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            kept.write(line)
    if process.returncode == 0:
        part.rename(file)
    return process.returncode == 0


def block(command: str) -> str | None:
    """What stands in the command's block: what it printed, when and where; None where it was not run."""
    file = printed(command)
    if not file.exists():
        return None
    day = date.fromtimestamp(file.stat().st_mtime)
    where = f"{day.day} {day:%B %Y}, {os.cpu_count()} cores of an {cpu_name()}, weights {weights()}"
    return f"{file.read_text(encoding='utf-8').strip()}\n\n`python {command}`, {where}."


def others() -> Iterator[str]:
    """Pages that name a bundled model and that no command makes."""
    ours = {page.path for page in pages()}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = path.relative_to(ROOT).as_posix()
        generated = name.startswith("docs/recipes/")
        if name not in ours and not generated and "bundled m" in path.read_text(encoding="utf-8"):
            yield name


def main(
    only: Annotated[
        str, typer.Option(metavar="PART", help="Pages whose path has this in it.")
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="Run nothing.")] = False,
    again: Annotated[bool, typer.Option(help="Run what ended well before, too.")] = False,
) -> None:
    """Make the pages again, in order; one that fails does not keep the others from it."""
    chosen = [page for page in pages() if only in page.path]
    if not chosen:
        paths = ", ".join(page.path for page in pages())
        raise typer.BadParameter(f"no page has {only!r} in its path; there are {paths}")
    rows = []
    for page in chosen:
        start, state = time.monotonic(), "kept"
        for command in page.commands:
            if printed(command).exists() and not again:
                continue
            if listed:
                state = "to be made"
                continue
            print(f"\n{page.path}: python {command}", flush=True)
            if not run(command):
                state = f"FAILED: python {command}"
                break
            state = "made"
        if not page.whole and not listed:
            fill(ROOT / page.path, block)
        rows.append((page.path, state, f"{time.monotonic() - start:.0f}"))
    table(["page", "", ">seconds"], rows)
    if not only:
        print(
            "\nThe text of these, and what follows, is for people to read again:",
            *others(),
            sep="\n  ",
        )
    if any(state.startswith("FAILED") for _, state, _ in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
