"""Tables are measured, on `--samples` batches."""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

from captured import keys_of, opened_program
from run import Kind
from texts import rows_of
from torch import Tensor

from accel.compiler.load.beside import beside
from accel.compiler.pipeline import pipeline
from accel.ir.errors import InputError
from accel.ir.tables import Tables
from accel.passes.kv._shared.tables import measured
from accel.passes.trained import measured_for, write


class Measured(Kind):
    """Nothing is learnt."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Tables)

    @classmethod
    def make(cls, method: type[Any], ids: Tensor | None, options: argparse.Namespace) -> str:
        """See Kind."""
        if options.aux is not None and not hasattr(method, "aux"):
            raise InputError(f"{options.method} goes by no smaller model; leave --aux out")
        program, one = opened_program(options), method()
        if options.aux is not None:
            one = method(aux=str(options.aux))
            program.beside = beside([one], pipeline(), program.facts, None)
        parts = measured(one, program, islice(rows_of(ids, options), options.samples))
        told = {n: str(getattr(options, n)) for n in ("samples", "length", "rows", "seed")}
        write(one, options.out, parts, measured_for(one, program, keys_of(program)), told)
        return f"{options.samples * options.rows} rows of {options.length} tokens"
