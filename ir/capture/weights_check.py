"""Weights that are not numbers, found before anything is computed with them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from accel.ir.capture.adapter import UsersProgram
from accel.ir.capture.prepare import Prepared
from accel.ir.capture.traits import ModelTraits
from accel.ir.errors import CaptureError


def check_weights(model: Prepared, traits: ModelTraits) -> None:
    """One pass over the parameters. (A buffer may hold -inf, as masks do.)

    Raises:
        CaptureError: a parameter holds NaN or inf.
    """
    for name, weight in _parameters(model):
        if (
            not weight.is_floating_point() or weight.sum().isfinite()
        ):  # much faster than isfinite of each
            continue
        if count := int((~weight.isfinite()).sum()):
            kind = "NaN" if weight.isnan().any() else "inf"
            raise CaptureError(
                f"{traits.name}: {name} {list(weight.shape)} holds {kind} ({count:,} of {weight.numel():,} values "
                "are no numbers); the checkpoint is damaged, or its training diverged: get it again, or repair "
                "that tensor"
            )


def _parameters(model: Prepared) -> Iterator[tuple[str, Tensor]]:
    """Name -> value of every parameter, read where it lies."""
    if isinstance(model.adapter, UsersProgram):
        yield from ((n, p.detach()) for n, p in model.adapter.program.named_parameters())
        return
    for name, weight in model.adapter.model.named_parameters():
        yield name, model.stored[weight].read() if weight in model.stored else weight.detach()
