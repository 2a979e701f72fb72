"""Every recipe that only encodes the cache: ONNX Runtime reads of the bundled model what torch reads."""

import numpy as np
import pytest
from reference_data import REFERENCE

import accel
from accel.ir.recipe import Recipe, bundled

CODECS = [name for name in bundled() if set(Recipe.load(name).tables) == {"kv.codec"}]
TOKENS = np.random.default_rng(0).integers(3, 4000, (1, 600))


@pytest.fixture(scope="module")
def logits():
    """logits(recipe, target) -> of a few tokens in a row without blocks, and of the last ones of a long row."""
    made = {}

    def get(recipe, target):
        if (recipe, target) not in made:
            with (
                accel.optimize(REFERENCE, recipe, max_context=640, target=target) as model,
                model.session() as session,
            ):
                few = session.run(TOKENS[:, :20])
                session.run(TOKENS[:, 20:598])
                made[recipe, target] = few, session.run(TOKENS[:, 598:])
        return made[recipe, target]

    return get


@pytest.mark.long
@pytest.mark.parametrize("name", CODECS)
def test_onnx_runtime_reads_what_torch_reads(logits, name):
    """The control: both are nearer to each other than to the model without a codec, where it lost anything."""
    runs = (logits(*of) for of in ((name, "onnx"), (name, "eager"), ("base", "eager")))
    for got, want, exact in zip(*runs, strict=True):
        assert 5 * np.abs(got - want).max() < max(1e-3, np.abs(got - exact).max())
    assert np.abs(got - exact).max() > 1e-3
