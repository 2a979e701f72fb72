"""Tables of a model: measured on a text, and kept where builds find them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from accel.compiler.assemble import Plan
from accel.compiler.over_state import keys_of, over_state
from accel.compiler.part_text import Batch, example_rows, text_ids, text_rows
from accel.ir.errors import InputError, PassError
from accel.ir.parts import part
from accel.ir.program import Program
from accel.ir.tables import Tables
from accel.ir.trained import place
from accel.passes.kv._shared.tables import measured
from accel.passes.trained import constants, measured_for, write
from accel.runtime.inputs.text import Tokenizer

Progress = Callable[[str, float], None]
T = TypeVar("T")


def watched(method: T) -> tuple[T, set[str]]:
    """A copy of a method, and the names of its options that were read of it: what is made with it depends on them."""
    names = {f.name for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    names -= {"table", "trained"}
    read: set[str] = set()

    class Watched(type(method)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    one = object.__new__(Watched)
    one.__dict__.update(vars(method))
    return one, read


def made_by(method: Any, read: Iterable[str]) -> dict[str, Any]:
    """The options that a part depends on, for its file. What is beside the model is told by its own numbers."""
    return {name: getattr(method, name) for name in sorted(read) if name != method_beside(method)}


def method_beside(method: Any) -> str:
    """The option that names a model beside the one that is compiled; empty: there is none."""
    return "aux" if hasattr(method, "aux") else ""


def measure(
    method: Tables,
    program: Program,
    rows: Iterator[Batch],
    settings: Mapping[str, Any],
    out: Path | None,
    progress: Progress,
    say: Callable[[str], None],
) -> Path:
    """The table of a program over state, from `settings["samples"]` batches of rows; its file: `out`, or in the cache.

    Raises InputError where the cache cannot be written.
    """
    one, read = watched(method)
    count = int(settings["samples"])
    start = time.monotonic()

    def batches() -> Iterator[Batch]:
        for number, batch in enumerate(islice(rows, count)):
            spent = time.monotonic() - start
            if number == 1:
                say(f"{count} batches take about {duration(spent * count)}")
            progress(f"{method.key}: batch {number + 1} of {count}", number / count)
            yield batch
        progress(f"{method.key}: what they tell", 1.0)

    parts = measured(one, program, batches())
    settings = {**settings, "seconds": f"{time.monotonic() - start:.1f}"}
    model, options = measured_for(method, program, keys_of(program)), made_by(method, read)
    file = out or kept_at(method.key, model, options)
    write(method, file, parts, model, settings, options)
    return file


def rows_for(
    method: Tables, tokenizer: Tokenizer, length: int, rows: int, seed: int
) -> Iterator[Batch]:
    """Of the method's examples, or else of accel's own text. Raises InputError."""
    ids, examples = text_ids(tokenizer, None, length), method.examples(seed)
    if examples is None:
        return text_rows(ids, length, rows, seed)
    return example_rows(tokenizer, examples, ids, length, seed)


def kept_at(key: str, model: str, options: Mapping[str, Any]) -> Path:
    """The place in the user's cache. Raises InputError."""
    try:
        return place(key, model, options)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{key}: {error}; or name a file of your own, out=…") from error


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def measure_missing(
    plan: Plan, captured: Program, tokenizer: Tokenizer | None, progress: Progress
) -> None:
    """Measure, on accel's own text, each table that a recipe's methods need and that is not there for this model.

    Raises InputError: the model has no tokenizer for the text.
    """
    wanted = [m for m in plan.methods.values() if isinstance(m, Tables) and not m.table]
    if not wanted:
        return
    program = over_state(captured.copy())
    for method in wanted:
        try:
            constants(method, program, keys_of(program))
            continue
        except PassError:
            pass
        if tokenizer is None:
            raise InputError(
                f"{method.key}: {captured.facts.name} has no tokenizer for the text that its table is measured on; "
                "pass tokenizer=…"
            )
        settings = part(method.key, True).settings
        length = min(int(settings["length"]), captured.facts.max_context)
        how = {**settings, "length": str(length), "seed": "0"}
        rows = rows_for(method, tokenizer, length, int(settings["rows"]), 0)
        measure(method, program, rows, how, None, progress, lambda _: None)
