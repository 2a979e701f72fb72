"""Make every page again that says something of the bundled models, and tell what was left to people.

    python tools/pages/all.py                  what was not made of the weights that are bundled now
    python tools/pages/all.py --list           the pages, their commands, and what was made
    python tools/pages/all.py --only drafts    the pages whose path has this in it
    python tools/pages/all.py --untimed        what other work on the machine does not disturb

Some commands write a page whole. The tables of others stand in blocks, `<!-- python COMMAND -->` to `<!-- end -->`,
into which goes what COMMAND prints, with the day, the processor and the weights. A command that ended well is not run
again for the same weights: what it printed is kept in build/pages, in a folder for each set of weights. What measures
no time runs first, several commands at a time; what does runs alone, and nothing else should run on the machine. The
text around tables is for people to read again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    Page(
        "docs/figures/leaderboard.md",
        ("tools/pages/leaderboard.py --part quality", "tools/pages/leaderboard.py"),
    ),
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


def timed(command: str) -> bool:
    """Whether it measures time, and so runs alone."""
    return command.startswith("tools/bench/bench_") or command == "tools/pages/leaderboard.py"


def run(command: str, shown: bool) -> bool:
    """Run it, keep what it prints, and show that too; whether it ended well."""
    file, start = printed(command), time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    print(f"python {command}", flush=True)
    with (
        part.open("w", encoding="utf-8") as kept,
        subprocess.Popen(
            [sys.executable, *shlex.split(command)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            kept.write(line)
            if shown:
                sys.stdout.write(line)
    if process.returncode == 0:
        part.rename(file)
    end = "" if process.returncode == 0 else " FAILED"
    print(f"python {command}:{end} {time.monotonic() - start:.0f} s", flush=True)
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
    untimed: Annotated[bool, typer.Option("--untimed", help="Measure no time.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Commands at a time.")] = os.cpu_count() or 1,
) -> None:
    """Make the pages again; a command that fails does not keep others from it, but for those after it on its page."""
    chosen = [page for page in pages() if only in page.path]
    if not chosen:
        paths = ", ".join(page.path for page in pages())
        raise typer.BadParameter(f"no page has {only!r} in its path; there are {paths}")
    todo = {page: [c for c in page.commands if again or not printed(c).exists()] for page in chosen}
    if listed:
        table(["page", "to be made"], [(p.path, "\n".join(c) or "-") for p, c in todo.items()])
        return
    failed: list[str] = []

    def made(wanted: list[str], shown: bool) -> None:
        for command in wanted:
            if not run(command, shown):
                failed.append(command)
                return

    with ThreadPoolExecutor(jobs) as pool:
        quiet = [
            pool.submit(made, [c for c in left if not timed(c)], False) for left in todo.values()
        ]
    for one in quiet:
        one.result()
    for page, left in todo.items():
        if not untimed and not any(command in failed for command in left):
            made([c for c in left if timed(c)], True)
        if not page.whole:
            fill(ROOT / page.path, block)
    rows = []
    for page, left in todo.items():
        late = [c for c in left if not printed(c).exists()]
        state = "FAILED" if set(left) & set(failed) else "to be made" if late else "made"
        rows.append((page.path, state if left else "kept"))
    table(["page", ""], rows)
    if not only:
        print(
            "\nThe text of these, and what follows, is for people to read again:",
            *others(),
            sep="\n  ",
        )
    if failed:
        print("FAILED:", *failed, sep="\n  python ")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
