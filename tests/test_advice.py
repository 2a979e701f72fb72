"""What a build says of a loss: which methods lose less, and where a recipe breaks a model."""

import pytest

from accel.compiler.advice import BROKEN, advice, refuse_broken
from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.errors import PassError, RecipeError
from accel.ir.recipe import Recipe, bundled

LOST = {
    "kl": 0.6, "kl_median": 0.4, "kl_99": 2.0, "perplexity": 30.0, "perplexity_float32": 20.0, "tokens": 2048,
    "text": "bundled",
}  # fmt: skip


def of(**tables):
    return assemble(
        Recipe(name="mine", tables={axis: {"use": use} for axis, use in tables.items()})
    )


def test_the_nearest_methods_that_lose_less_are_named():
    said = advice(LOST, of(weights="int4"))
    assert "by weights = int4: weights = int8 or quantspec-weights loses less" in said
    assert "leave [weights] out" in advice(LOST, of(weights="float16")), "none loses less"
    assert "leave [depth] out" in advice(LOST, of(depth="shortgpt"))


def test_of_a_small_loss_nothing_is_said():
    assert not advice({**LOST, "perplexity": 21.0}, of(weights="int8"))


@pytest.mark.parametrize("axis", ["weights", "kv.codec", "depth"])
def test_every_method_has_advice(axis):
    for name in find_axes()[axis].names():
        try:
            plan = assemble(Recipe(name=name, tables={axis: {"use": name}}))
        except RecipeError:
            continue  # which needs options
        assert bool(advice(LOST, plan)) == any(step.grade == "approximate" for step in plan.passes)


def test_a_broken_model_is_refused_on_real_text_only():
    plan = assemble(Recipe.load("shortgpt"))
    assert "shortgpt" in bundled()
    refuse_broken(lost := dict(LOST), plan)
    assert lost["advice"]
    broken = {**LOST, "kl_median": BROKEN + 1}
    refuse_broken({**broken, "text": "random"}, plan)
    with pytest.raises(
        PassError, match="^recipe 'shortgpt' breaks this model: half of 2,048 .* leave .depth. out"
    ):
        refuse_broken(dict(broken), plan)
