"""Tables are measured, on `--samples` batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accel.compiler.load.second_model import second_model
from accel.compiler.measure import measure
from accel.compiler.pipeline import pipeline
from accel.compiler.train.kind import Kind, Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.ir.tables import Tables


class Measured(Kind):
    """Nothing is learnt."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Tables)

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        program = source.program
        options = replace(options, length=min(options.length, program.facts.max_context))
        if options.aux is not None:
            program.second_model = second_model(
                [method], pipeline(), program.facts, source.tokenizer
            )
        rows = source.rows_of(method, options.length, options.rows, options.seed)
        told = options.as_text("samples", "length", "rows", "seed")
        file = measure(method, program, rows, told, options.out, source.progress, source.say)
        return Made(file, f"{options.samples * options.rows} rows of {options.length} tokens")
