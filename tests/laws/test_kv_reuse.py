"""Laws of reuse: a method says what it promises, what it cannot be combined with, and both sides hear why."""

import numpy as np
import pytest

from accel.compiler.assemble import EVICTION, GRADES, assemble
from accel.ir.axis import find_axes
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.passes import Pass
from accel.runtime.kv.reuse._pieces import Pieces

from ..prefill_case import built, far
from ..session_ways import oracle

TEXT, OTHER = np.random.default_rng(1).integers(3, 50, (2, 30))
AXES = find_axes()
NAMES = AXES["kv.reuse"].names()


def law(method):
    """Passes that do something, a grade as weak as theirs, and no eviction, which leaves nothing to reuse."""
    steps = method.steps()
    assert steps and all(isinstance(step, Pass) for step in steps)
    assert GRADES.index(method.grade) >= max(GRADES.index(step.grade) for step in steps)
    for axis in EVICTION:
        for use in AXES[axis].names():
            assert method.relies & AXES[axis].build(use).breaks, "what was dropped cannot be reused"


@pytest.mark.parametrize("name", NAMES)
def test_law(name):
    law(AXES["kv.reuse"].build(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_law_catches_a_promise_that_the_passes_do_not_keep(name):
    class Boasts(AXES["kv.reuse"].method(name)):
        grade = GRADES[0]

    class Careless(AXES["kv.reuse"].method(name)):
        relies = frozenset()

    for broken in (Boasts(), Careless()):
        with pytest.raises(AssertionError):
            law(broken)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", EVICTION)
def test_eviction_is_refused_with_both_sides_named(name, axis):
    use = AXES[axis].names()[0]
    recipe = Recipe(name="both", tables={"kv.reuse": {"use": name}, axis: {"use": use}})
    with pytest.raises(RecipeError) as caught:
        assemble(recipe)
    assert f"kv.reuse = {name}" in str(caught.value) and f"{axis} = {use}" in str(caught.value)
    assert "leave one of the two out" in str(caught.value)


def law_of_prompts(name, stored):
    """A prompt that nothing is known of, the same again, and a longer one have the logits of recomputing."""
    tables = {"kv.reuse": {"use": name, **AXES["kv.reuse"].small(name)}}
    made, base = built("llama", tables=tables), built("llama")
    model = oracle(made)  # that has seen no prompt
    with model.session() as session:
        session.prompt(stored[None])
    for prompt in (TEXT, TEXT, np.concatenate([TEXT, OTHER])):
        with model.session() as session, base.session() as again:
            assert far(session.prompt(prompt[None]), again.prompt(prompt[None])) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_are_known_and_those_that_are_not(name):
    law_of_prompts(name, OTHER[::-1])


@pytest.mark.parametrize(
    "name", [name for name in NAMES if issubclass(AXES["kv.reuse"].method(name), Pieces)]
)
def test_the_law_of_prompts_catches_parts_behind_other_texts(name):
    """They are approximate."""
    with pytest.raises(AssertionError):
        law_of_prompts(name, TEXT[5:])
