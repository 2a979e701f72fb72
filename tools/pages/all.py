"""Make every page again that says something of the bundled models, and tell what was left to people.

    python tools/pages/all.py                  what was not made of the weights that are bundled now
    python tools/pages/all.py --list           the pages, their commands, and what was made
    python tools/pages/all.py --only drafts    the pages whose path has this in it

A command that ended well is not run again for the same weights. What it printed is kept in build/pages, in a folder for
each set of weights; some pages take their tables from there by hand, since a text explains each. Nothing else should
run on the machine: most of it is timed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from results import ROOT, folder

from accel.commands.console import table


@dataclass(frozen=True)
class Page:
    """`by_hand`: its commands print tables, which somebody puts into it."""

    path: str
    commands: tuple[str, ...]
    by_hand: bool = True


PAGES = (
    Page("api/reference/README.md", ("tools/train/reference.py --evaluate",), by_hand=False),
    Page("docs/figures/leaderboard.md", ("tools/pages/leaderboard.py",), by_hand=False),
    Page(
        "docs/figures/speculation.md",
        (
            "tools/bench/bench_speculation.py",
            "tools/bench/bench_speculation.py --page docs/figures",
        ),
        by_hand=False,
    ),
    Page(
        "docs/figures/served.md",
        ("tools/pages/served.py", "tools/pages/served.py --page docs/figures"),
        by_hand=False,
    ),
    Page("docs/figures/details/claims.md", ("tools/pages/claims.py",)),
    Page("docs/figures/details/codecs.md", ("tools/pages/claims.py gear leank --prompts 1",)),
    Page("docs/figures/details/selection.md", ("tools/pages/claims.py louiskv shadowkv specache",)),
    Page(
        "docs/figures/details/drafts.md",
        (
            "tools/bench/bench_lengths.py --prompts 1",
            "tools/bench/bench_lengths.py --prompts 1 --temperature 0.8",
            "tools/bench/bench_like.py --rounds 3",
            "tools/bench/bench_crossover.py",
        ),
    ),
    Page(
        "docs/figures/details/diffusion.md",
        ("tools/bench/bench_diffusion.py --prompts 16 --tokens 70 --new 64 --block 32",),
    ),
    Page("docs/figures/details/saved.md", ("tools/bench/bench_saved.py",)),
    Page("docs/figures/details/cache.md", ("tools/bench/bench_reuse.py api/reference",)),
    Page("docs/figures/details/weights.md", ("tools/bench/weights_loss.py",)),
    Page("docs/figures/details/builds.md", ("tools/bench/bench_predict.py",)),
    Page("docs/internals/batch.md", ("tools/bench/bench_flat.py",)),
)


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


def others() -> Iterator[str]:
    """Pages that name a bundled model and that no command makes."""
    ours = {page.path for page in PAGES}
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
    chosen = [page for page in PAGES if only in page.path]
    if not chosen:
        paths = ", ".join(page.path for page in PAGES)
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
        rows.append((page.path, state, f"{time.monotonic() - start:.0f}"))
    table(["page", "", ">seconds"], rows)
    for page in chosen:
        if page.by_hand:
            names = ", ".join(printed(command).name for command in page.commands)
            print(f"{page.path} takes its tables by hand from {names}")
    print(f"in {folder('pages').relative_to(ROOT)}/")
    if not only:
        print("\nMade by no command; read them again:", *others(), sep="\n  ")
    if any(state.startswith("FAILED") for _, state, _ in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
