"""Every bundled recipe on the Triton target beside the eager one: the same tokens and, within rounding, logits."""

from dataclasses import dataclass

import matrix
import numpy as np
import pytest

from accel.compiler.assemble import assemble, check_target
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe, bundled

from .test_triton_models import beside

QUICK = {"quest", "by-branch"}  # by default: a selection of pages, branches of the host
PROMPTS = [[5, 9, 40, 7, 5, 9, 40, 7, 5, 9], [7, 7, 30]]


@dataclass(frozen=True)
class Bundled(matrix.Case):
    """A recipe: its methods with their options; sizes are those for tiny models."""

    recipe: str = "base"


class Runner(matrix.Matrix):
    """Which knows the options of a recipe beside its methods."""

    def _recipe(self, case: Bundled) -> Recipe:
        found = super()._recipe(case)
        for axis, table in Recipe.load(case.recipe).tables.items():
            kept = {
                k: v for k, v in table.items() if not k.endswith("_ratio")
            }  # `tokens_kept` says
            found.tables[axis] = kept | found.tables[axis]
        return found


@pytest.fixture(scope="module")
def runner():
    return Runner()


def case_of(name: str) -> Bundled:
    tables = Recipe.load(name).tables
    return Bundled("llama", tuple((axis, table["use"]) for axis, table in tables.items()), name)


def unlike(runner: Runner, name: str) -> str:
    """How the two targets differ with a recipe; nothing: empty. Raises AccelError where either refuses it."""
    check_target(assemble(Recipe.load(name)), "triton")
    case = case_of(name)
    eager = runner.eager(case)
    rounded, turns, _ = runner.strict(case.tables)
    with eager, beside(eager) as model:
        want, got = driven(eager), driven(model)
        if said := matrix.different(want, got, rounded, turns):
            return said
        if turns or rounded > matrix.EXACT:  # rounding may turn a close choice of a token
            return ""
        try:
            tokens = eager.generate(PROMPTS, 4, eos=[]).tokens
        except AccelError:  # a model or a head that drafts is built along with others alone
            return ""
        found = model.generate(PROMPTS, 4, eos=[]).tokens
        return "" if tokens == found else f"tokens: {tokens} and {found}"


def driven(model):
    """A ragged prompt, a token, several at once, and a token behind a rewind."""
    ids = np.stack([np.random.default_rng(n).permutation(90)[:30] for n in range(2)])
    seen = {}
    with model.session(2) as session:
        seen["prompt"] = session.prompt(ids[:, :20], np.array([20, 17]))
        seen["token"] = session.run(ids[:, 20:21])
        seen["several"] = session.run(ids[:, 21:24])
        try:
            session.rewind(session.lengths - 2)
        except AccelError:
            seen["rewind"] = "refused"
        seen["after"] = session.run(ids[:, 24:25])
        seen["held"] = session.lengths.tolist()
    return seen


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in bundled()]
)
def test_a_recipe_is_as_on_the_eager_target(runner, name):
    try:
        said = unlike(runner, name)
    except AccelError as error:
        pytest.skip(f"a target refuses it: {error}")
    assert not said


def test_what_differs_is_seen(runner, monkeypatch):
    from accel.runtime.backends.triton import session as sessions

    right = sessions._Lying.whole
    monkeypatch.setattr(sessions._Lying, "whole", lambda self: right(self) + 0.1)
    assert "logits differ" in unlike(runner, "base")
