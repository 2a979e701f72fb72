"""Tokens, heads and bits together: what each of the three does alone is what it does beside the others."""

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.recipe import Recipe

from .prefill_case import built

PROMPT = np.random.default_rng(0).integers(3, 50, (1, 40))
TABLES = Recipe.load("tokens-heads-bits").tables


def logits(*axes, kept=8):
    """Of a prompt and four tokens after it, with these of the recipe's tables."""
    tables = {axis: {"use": TABLES[axis]["use"]} for axis in axes}
    for axis in {"kv.score", "kv.budget"} & set(axes):
        tables[axis] |= find_axes()[axis].small(TABLES[axis]["use"])
    if "kv.budget" in axes:
        tables["kv.budget"]["tokens_kept"] = kept
    with built("llama", "eager", tables).session() as session:
        out = [session.prompt(PROMPT)]
        return np.concatenate([*out, *(session.run(np.array([[t]])) for t in (5, 6, 7, 8))], 1)


def far(some, others):
    return np.abs(some - others).max()


@pytest.mark.long
def test_eight_bits_change_little_of_what_eviction_leaves():
    evicted = logits("kv.score", "kv.budget")
    assert 0 < far(logits(*TABLES), evicted) < 0.05 * np.abs(evicted).max()


@pytest.mark.long
def test_each_of_the_three_does_what_it_does_alone():
    all_three, coded = logits(*TABLES), logits("kv.codec")
    assert far(logits(*TABLES, kept=64), coded) < 1e-5  # a budget of the whole prompt
    assert far(all_three, coded) > 10 * far(all_three, logits("kv.score", "kv.budget"))
