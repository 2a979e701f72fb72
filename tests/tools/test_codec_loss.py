"""tools/bench/codec_loss.py: the KL of a stored cache, by hand, and behind a prompt of a small model."""

import codec_loss
import models
import numpy as np
import pytest

import accel
from accel.ir.errors import InputError
from accel.ir.recipe import Recipe


def test_the_loss_is_the_kl_by_hand():
    want, found = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    mean, late, same = codec_loss.loss(want, found)
    first = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert mean == pytest.approx(first / 2) and late == pytest.approx(0.9 * first)
    assert same == 0.5, "the first of equal ones is the best"
    assert codec_loss.loss(want, want) == (0.0, 0.0, 1.0)


def test_a_recipe_takes_options_of_its_codec():
    recipe = codec_loss.with_options("kivi-2+group=32+recent=64")
    plain = Recipe.load("kivi-2").tables["kv.codec"]
    assert recipe.tables["kv.codec"] == {**plain, "group": 32, "recent": 64} != plain
    for wrong in ("kivi-2+bits", "kivi-2+bits=two", "snapkv+bits=2"):
        with pytest.raises(InputError):
            codec_loss.with_options(wrong)


@pytest.mark.long
def test_a_codec_loses_something_and_none_nothing():
    model, ids = models.ARCHITECTURES["llama"](), list(range(3, 60))
    rows = {}
    for name in ("base", "kv-int8"):
        with accel.optimize(model, name, target="eager", max_context=64, verify=False) as built:
            rows[name], _ = codec_loss.log_odds(built, ids, 40)
        assert rows[name].shape[0] == len(ids) - 40
    assert 0 < codec_loss.loss(rows["base"], rows["kv-int8"])[0] < 0.01
