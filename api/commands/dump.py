"""The text of the program before and after each pass, in files that diff well."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def dumping(folder: Path | None) -> Iterator[None]:
    """While it is entered, `optimize` writes `NN-pass.txt` into the folder; None: nothing."""
    if folder is None:
        yield
        return
    from accel.ir.text import program_text

    folder.mkdir(parents=True, exist_ok=True)
    module: Any = importlib.import_module("accel.runtime.optimize")
    plain = module.run
    count = 0

    def write(name: str, program: Any) -> None:
        nonlocal count
        path = folder / f"{count:02d}-{name.lower()}.txt"
        path.write_text(program_text(program), encoding="utf-8")
        count += 1

    def run(program: Any, passes: Any, check: Any = None, watch: Any = lambda *_: None) -> Any:
        def both(step: Any, line: Any, changed: Any) -> None:
            write(line.name, changed)
            watch(step, line, changed)

        write("captured", program)
        return plain(program, passes, check, both)

    module.run = run
    try:
        yield
    finally:
        module.run = plain
