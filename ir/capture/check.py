"""The captured program against the model that it was captured from."""

from __future__ import annotations

import itertools

from torch import Tensor

from accel.ir.capture.encoder import INPUTS
from accel.ir.capture.examples import encoder_example, example
from accel.ir.capture.prepare import Prepared
from accel.ir.capture.rounding import apart
from accel.ir.capture.traits import ModelTraits
from accel.ir.errors import CaptureError
from accel.ir.program import Program
from accel.ir.ties import FirstOfTies

BOUND = 1e-4  # of the largest logit (at least 1)


def check(program: Program, model: Prepared, traits: ModelTraits) -> None:
    """Run both at odd sizes; mandatory, since a guard can lie: a single token, where a size may have been taken for
    one that is always 1, and more rows and tokens than the example had, where one may have been frozen. A token that
    rounding alone takes further than the bound is held to that. Where the model chooses among equals, both take the
    first, and a note says so.

    Raises:
        CaptureError: they differ, or the model gives no numbers.
    """
    ties = FirstOfTies()

    def run() -> Tensor:
        with FirstOfTies():
            return model(*given.values()).float()

    for seed, (batch, length) in enumerate([(1, 1), (3, 17)]):
        length = min(length, program.facts.max_context)
        tokens = example(batch, length, program.facts.vocab_size, seed)
        given = dict(zip(("tokens", "positions"), tokens, strict=True))
        given |= encoder_example(program.facts.encoder, batch, seed)
        for number, key in itertools.product(traits.uncounted, ("tokens", INPUTS)):
            given[key] = given[key].masked_fill(given[key] == number, number + 1)
        with ties:
            want = model(*given.values()).float()
        if not want.isfinite().all():
            raise CaptureError(
                f"{traits.name}: the model's own logits are not all numbers at B={batch}, T={length}, though "
                "its weights are; run it in PyTorch and see which module gives NaN or inf"
            )
        got = program.run("step", given)["logits"].float()
        scale = max(1.0, float(want.abs().max()))
        error = float(apart(got, want, scale, run, BOUND).max())
        if error > BOUND:
            why = (
                "some of its experts are equally good (a router of zeros or of equal rows), so rounding decides which "
                "of them run: load trained weights"
                if ties.tied
                else "its forward depends on Python state or randomness that torch.export froze"
            )
            raise CaptureError(
                f"{traits.name}: the captured graph differs from the module by {error:.1e} at B={batch}, "
                f"T={length}; {why}"
            )
    if ties.tied:
        program.facts.tied = True
        program.facts.notes.append(
            f"{ties.tied} of {ties.choices} choices are ties, as of a router of zeros: accel takes the first of equal "
            "experts, the model's own code may take others"
        )
