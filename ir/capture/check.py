"""The captured program against the model that it was captured from."""

from __future__ import annotations

import itertools

from accel.ir.capture.encoder import INPUTS
from accel.ir.capture.examples import encoder_example, example
from accel.ir.capture.prepare import Prepared
from accel.ir.capture.traits import ModelTraits
from accel.ir.errors import CaptureError
from accel.ir.program import Program


def check(program: Program, model: Prepared, traits: ModelTraits) -> None:
    """Run both at odd sizes; mandatory, since a guard can lie.

    Raises:
        CaptureError: they differ.
    """
    for seed, (batch, length) in enumerate([(1, 1), (3, 2), (2, 17)]):
        length = min(length, program.facts.max_context)
        tokens = example(batch, length, program.facts.vocab_size, seed)
        given = dict(zip(("tokens", "positions"), tokens, strict=True))
        given |= encoder_example(program.facts.encoder, batch, seed)
        for number, key in itertools.product(traits.uncounted, ("tokens", INPUTS)):
            given[key] = given[key].masked_fill(given[key] == number, number + 1)
        want = model(*given.values()).float()
        got = program.run("step", given)["logits"].float()
        scale = max(1.0, float(want.abs().max()))
        error = float((got - want).abs().max()) / scale
        if not error <= 1e-4:  # also refuses NaN
            raise CaptureError(
                f"{traits.name}: the captured graph differs from the module by {error:.1e} at B={batch}, T={length}; "
                "its forward depends on Python state or randomness that torch.export froze"
            )
