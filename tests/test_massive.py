"""A token with a massive activation: its logits move by rounding as no other's do. Builds are right all the same, and
mistakes are found.
"""

import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.recipe import bundled
from accel.passes import run
from accel.passes.check import NumericCheck, token_errors
from accel.passes.weights.int8 import Int8

from .massive_case import SINK, TAKES, TOKEN, TOKENS, WRITES, WRITTEN, massive

NAMES = find_axes()["weights"].names()


@pytest.fixture(scope="module")
def model():
    return massive()


def test_one_token_carries_it_from_one_layer_to_another(model):
    with torch.no_grad():
        streams = model.model(TOKENS[:1], output_hidden_states=True).hidden_states
    carried = torch.stack([s[0, :, SINK].abs() for s in streams])
    at = (TOKENS[0] == TOKEN).nonzero().flatten()
    others = carried[:, TOKENS[0] != TOKEN]
    assert others.max() < 1e-3
    assert carried[WRITES + 1 : TAKES + 1, at].min() > 0.5 * WRITTEN
    assert carried[TAKES + 1 : -1, at[-1]].max() < 0.2 * WRITTEN


@pytest.mark.long
def test_rounding_moves_that_token_most(model):
    """By far more than others, so no bound on the worst token could be kept."""
    program = capture(model, max_context=64)
    check = NumericCheck(program)
    run(program, [*pipeline(), Int8(smallest=256, block=32)], check)
    ((tokens, want),), (rounded,) = check.cases, check.rounded
    errors = token_errors(rounded, want)
    assert errors[tokens.flatten() == TOKEN].max() > 5 * errors.median()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_recipe_builds_with_its_checks(model, name):
    weights = {"use": name, **find_axes()["weights"].small(name)}
    recipe = {"weights": weights, "kv.codec": {"use": "kv-float32"}}
    with accel.optimize(model, recipe, max_context=64) as compiled:
        steps = {s["name"]: s for s in compiled.report["steps"]}
        assert max(s["error"] for s in steps.values() if s["error"] is not None) < 1e-4
        assert compiled.report["errors"]["onnx"] < 1e-3, "with exact inputs of products"


@pytest.mark.long
@pytest.mark.parametrize("name", list(bundled()))
def test_no_recipe_is_refused_by_a_check(model, name):
    """Some need what this model has not, such as a file that was measured for it: that is no check."""
    try:
        accel.optimize(model, name, max_context=64).close()
    except accel.AccelError as error:
        assert "changed what the program computes" not in str(error)
        assert "differs from the model" not in str(error)
