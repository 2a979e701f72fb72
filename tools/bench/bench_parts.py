"""What it costs to measure the tables of methods on a model, as a Markdown table.

    python tools/bench/bench_parts.py MODEL                    # all tables
    python tools/bench/bench_parts.py MODEL kvquant rotatekv   # some

The model is captured once. Each table is measured by the defaults of `accel-compile train`, on one thread, into a
folder that is thrown away; times are the processor's.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from turns import head, row

from accel.compiler.load.source import open_source
from accel.compiler.train.kind import kind_of, trained_methods
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.ir.parts import parts


def main(
    model: Annotated[Path, typer.Argument(help="A model directory or a GGUF file.")],
    methods: Annotated[list[str] | None, typer.Argument(help="By default all tables.")] = None,
) -> None:
    """Print a row for each table when it is measured."""
    torch.set_num_threads(1)
    quiet = (lambda *_: None,) * 2
    source = Source(model, open_source(model).tokenizer, None, *quiet)
    start = time.process_time()
    facts = source.program.facts
    print(
        f"{model.name}: {facts.parameters:,} parameters; load and capture take "
        f"{time.process_time() - start:.0f} s of processor time\n"
    )
    head("method", "tokens read", "processor time, s", "ms per token", "file, kB")
    known = trained_methods()
    with TemporaryDirectory() as folder:
        for key in methods or [key for key, one in parts().items() if one.measured]:
            axis, method = known[key]
            given = {"threads": 1, "out": Path(folder) / f"{key}.safetensors"}
            options, kind = TrainOptions.of(key, given), kind_of(method)
            assert kind is not None
            start = time.process_time()
            try:
                file = kind.make(find_axes()[axis].build(key), source, options).file
            except AccelError as error:
                row(f"`{key}`", f"refused: {error}", "", "", "")
                continue
            assert file is not None
            spent, size = time.process_time() - start, file.stat().st_size
            tokens = options.samples * options.rows * min(options.length, facts.max_context)
            each = f"{1000 * spent / tokens:.1f}"
            row(f"`{key}`", f"{tokens:,}", f"{spent:.0f}", each, f"{size / 1000:.0f}")


if __name__ == "__main__":
    typer.run(main)
