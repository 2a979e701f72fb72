"""nn.Module or ExportedProgram -> Program, in four steps: inspect, export, convert, check.

The captured program takes `tokens [B,T]` and `positions [B,T]` (and what an encoder takes, see
`ir/capture/encoder.py`) and returns `logits [B,T,V]`; it is checked against the module on odd sizes before
anything else happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accel.ir.capture.check import check
from accel.ir.capture.convert import convert
from accel.ir.capture.export import export
from accel.ir.capture.inspect import inspect
from accel.ir.capture.prepare import prepared
from accel.ir.capture.traits import ModelTraits
from accel.ir.capture.weights_check import check_weights
from accel.ir.errors import CaptureError
from accel.ir.openmp import rest_late
from accel.ir.program import Program
from accel.ir.weights import Pages, Stored


def capture(
    model: Any, max_context: int = 2048, stored: Mapping[Tensor, Stored] | None = None
) -> Program:
    """Capture a decoder.

    Args:
        model: an `nn.Module` whose forward takes token ids [B,T] (and optionally positions) and
            returns logits [B,T,V], or an `ExportedProgram` of one with dynamic B and T, or a
            transformers encoder-decoder model.
        max_context: the longest sequence that the program will be asked for.
        stored: for tensors of the module that only stand in for others, where the values lie.

    Raises:
        CaptureError: the module cannot be exported, or computes something else once exported.
    """
    return capture_inspected(model, inspect(model, max_context), stored)


def capture_inspected(
    model: Any, traits: ModelTraits, stored: Mapping[Tensor, Stored] | None = None
) -> Program:
    """`capture` of a model of which the traits are known."""
    traits.require()
    rest_late()
    with prepared(model, traits, stored) as ready:
        check_weights(ready, traits)
        Pages.give_back()
        exported = export(ready, traits)
        program = convert(exported)
        try:
            check(program, ready, traits)
        except CaptureError:
            if not exported.repeated:
                raise
            program = convert(export(ready, traits, whole=True))  # layers may share Python state
            check(program, ready, traits)
    Pages.give_back()
    return program
