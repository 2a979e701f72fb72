"""Every recipe that only encodes the cache: ONNX Runtime reads of the bundled model what torch reads."""

from itertools import cycle

import numpy as np
import pytest
from reference_data import REFERENCE

import accel
from accel.ir.recipe import Recipe, bundled

CODECS = [name for name in bundled() if set(Recipe.load(name).tables) == {"kv.codec"}]
TOKENS = np.random.default_rng(0).integers(3, 4000, (1, 600))


@pytest.fixture(scope="module")
def logits():
    """logits(recipe, target) -> of a few tokens in a row without blocks, and of the last ones of a long row; those of
    each graph of the step for "onnx", one after another.
    """
    made = {}

    def get(recipe, target):
        if (recipe, target) not in made:
            with accel.optimize(REFERENCE, recipe, max_context=640, target=target) as model:
                if target == "eager":
                    made[recipe, target] = asked(model)
                else:
                    made[recipe, target] = [
                        one
                        for kernels in sorted(model.artifact.entries["step"].graphs)
                        for one in asked(accel.load(model.artifact.path, kernels=kernels))
                    ]
        return made[recipe, target]

    return get


def asked(model):
    with model, model.session() as session:
        few = session.run(TOKENS[:, :20])
        session.run(TOKENS[:, 20:598])
        return few, session.run(TOKENS[:, 598:])


@pytest.mark.long
@pytest.mark.parametrize("name", CODECS)
def test_onnx_runtime_reads_what_torch_reads(logits, name):
    """Whether codes are read in place (native) or decoded. The control: both are nearer to each other than to the model
    without a codec, where it lost anything.
    """
    runs = logits(name, "onnx")
    both = zip(logits(name, "eager"), logits("base", "eager"), strict=True)
    for got, (want, exact) in zip(runs, cycle(both), strict=False):
        assert 5 * np.abs(got - want).max() < max(1e-3, np.abs(got - exact).max())
    assert np.abs(got - exact).max() > 1e-3
