"""What the commands print: progress, tables, sizes. rich is imported only where it draws."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from threading import Timer
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from accel.compiler.load.fetch.models import Model
    from accel.compiler.load.fetch.wheels import Watch

T = TypeVar("T")
Progress = Callable[[str, float], None]
PATIENCE = 0.5  # seconds
PIPE_WIDTH = 100  # columns of a table that no terminal shows


def console() -> Console:
    """A rich console on stdout, of a fixed width where that is not a terminal."""
    from rich.console import Console

    return Console(
        width=None if sys.stdout.isatty() else PIPE_WIDTH,
        highlight=False,
        emoji=False,
        markup=False,
    )


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A callback for `optimize`: a bar on a terminal, else a line per step, always on stderr."""
    if not sys.stderr.isatty():
        yield lambda name, done: typer.echo(f"{title}: {done:4.0%} {name}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    # a capture silences sys.stderr for what torch prints; the bar goes on
    with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def show(name: str, done: float) -> None:
            bar.update(task, completed=done, description=f"{title}: {name}")

        yield show


@contextmanager
def paced(title: str) -> Iterator[Progress]:
    """Progress on stderr, the part that is done from 0 to 1; a line each two seconds where that is no terminal, and
    nothing of what takes half a second.
    """
    pause = 0.1 if sys.stderr.isatty() else 2.0
    last = time.monotonic() - pause + 0.5
    with progress(title) as show:

        def tell(what: str, done: float) -> None:
            nonlocal last
            if time.monotonic() - last >= pause:
                last = time.monotonic()
                show(what, min(1.0, done))

        yield tell


def waited(pieces: Iterator[T]) -> Iterator[T]:
    """The same pieces; a terminal shows on stderr that the first one takes more than `PATIENCE`, and how long: a search
    gives its text at the end.
    """
    if not sys.stderr.isatty():
        yield from pieces
        return
    with ExitStack() as shown:
        timer = Timer(PATIENCE, lambda: shown.enter_context(_waiting()))
        timer.start()
        try:
            first = list(islice(pieces, 1))
        finally:
            timer.cancel()
            timer.join()
    yield from first
    yield from pieces


@contextmanager
def _waiting() -> Iterator[None]:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("computing the first token", total=None)
        yield


@contextmanager
def fetching(model: Model) -> Iterator[Watch]:
    """A callback for `fetch` of a model, shown as `paced` does."""
    done, total = 0, model.work
    with paced(model.name) as tell:

        def watch(what: str, count: int) -> None:
            nonlocal done
            done += count
            tell(what, done / total)

        yield watch


@contextmanager
def training(title: str) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """A callback for `train`, and one for lines: a bar with the time that is left on a terminal, else a line at every
    twentieth, always on stderr.
    """
    if not sys.stderr.isatty():
        last = ("", -1)

        def line(name: str, done: float) -> None:
            nonlocal last
            if (now := (name if not done else "", int(20 * done))) != last:
                last = now
                typer.echo(f"{title}: {done:4.0%} {name}", err=True)

        yield line, lambda text: typer.echo(f"{title}: {text}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def show(name: str, done: float) -> None:
            bar.update(task, completed=done, description=f"{title}: {name}")

        yield show, lambda text: bar.console.print(f"{title}: {text}", markup=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table. A column whose name starts with '>' is set to the right."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        shown.add_column(
            column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    for row in rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    console().print(shown)


def options_table(described: Sequence[Mapping[str, object]]) -> None:
    """Print the options of a method, as `explain.words.options` gives them."""
    if described:
        columns = {
            "name": "option",
            "value": ">value",
            "default": ">default",
            "type": "type",
            "range": "range",
        }
        table(list(columns.values()), [[one[key] for key in columns] for one in described])


def pairs(values: Sequence[tuple[str, object]]) -> None:
    """Print names and what they are, one per line; a value without anything is left out."""
    width = max((len(name) for name, _ in values), default=0)
    for name, value in values:
        if value not in (None, "", []):
            typer.echo(f"{name:<{width}}  {value}")


def print_json(value: Any) -> None:
    """A value as JSON that other programs read."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def size(count: float) -> str:
    """Bytes as people read them: 512 B, 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def error_text(error: float | None) -> str:
    """An error as a power of ten; a dash where nothing was checked."""
    return "-" if error is None else "0" if error == 0 else f"{error:.1e}"
