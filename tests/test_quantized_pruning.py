"""More tokens in fewer bits: a pruner and a codec of single tokens together (section 3)."""

from pathlib import Path

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.recipe import Recipe
from accel.passes.kv.codec import At

from .prefill_case import built

RECIPES = Path(__file__).parents[1] / "recipes"
PROMPT = np.random.default_rng(0).integers(3, 50, (1, 40))


def logits(budget=None, codec=None):
    """Of the prompt and four tokens after it."""
    tables = {}
    if budget:
        tables["kv.score"] = {"use": "snapkv", **find_axes()["kv.score"].small("snapkv")}
        tables["kv.budget"] = {"use": "uniform", "tokens_kept": budget}
    if codec:
        tables["kv.codec"] = {"use": "kv-adaquant", "key_bits": codec, "value_bits": codec}
    with built("llama", tables=tables).session() as session:
        out = [session.prompt(PROMPT)]
        return np.concatenate([*out, *(session.run(np.array([[t]])) for t in (5, 6, 7, 8))], 1)


@pytest.mark.long
def test_a_budget_of_the_whole_prompt_is_the_codec_alone():
    assert np.allclose(logits(budget=64, codec=4), logits(codec=4), atol=1e-5)
    assert not np.allclose(logits(budget=8, codec=4), logits(codec=4), atol=1e-3)  # the control


@pytest.mark.long
def test_more_bits_come_to_the_pruner_alone():
    pruned = logits(budget=8)
    off = [np.abs(logits(budget=8, codec=bits) - pruned).max() for bits in (2, 4, 8)]
    assert off[0] > off[1] > off[2]


@pytest.mark.parametrize("name", ["quantized-pruning", "quantized-pyramid"])
def test_the_bytes_are_those_of_a_quarter_of_the_tokens(name):
    """4096 tokens in 4 bits, scales aside, as 1024 in 16."""
    tables = Recipe.load(RECIPES / "cache" / f"{name}.toml").tables
    options = {name: value for name, value in tables["kv.codec"].items() if name != "use"}
    codec = find_axes()["kv.codec"].build("kv-adaquant", **options)
    bits = sum(codec.bits_of(At(role, 128)) for role in "kv") / 2
    assert tables["kv.budget"]["tokens_kept"] * bits == pytest.approx(1024 * 16, rel=0.13)
