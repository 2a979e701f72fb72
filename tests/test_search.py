"""Beam search beside transformers', and searches over what recipes make of the cache."""

from collections import Counter

import numpy as np
import pytest
import torch

from accel.compiler.assemble import assemble
from accel.ir.recipe import Recipe, bundled
from accel.runtime.decode.context import DecodeContext
from accel.runtime.loop.beam_patience import BeamPatience
from accel.runtime.loop.first_finish import FirstFinish
from accel.runtime.sample.standard import Standard

from .draft_case import rows_of
from .kv_case import table
from .prefill_case import built, module

EOS = [12, 34]


def theirs(prompt, eos, limit=14, **options):
    """The new tokens of transformers, up to eos."""
    found = module("llama").generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=limit,
        do_sample=False, eos_token_id=eos, pad_token_id=0, use_cache=False, **options,
    )[0, len(prompt) :].tolist()  # fmt: skip
    ends = [i for i, token in enumerate(found) if token in eos]
    return found[: ends[0] + 1] if ends else found


@pytest.mark.parametrize(
    ("mine", "options"),
    [
        ({}, {"early_stopping": True}),
        (
            {"beams": 2, "length_penalty": 2.0},
            {"early_stopping": True, "length_penalty": 2.0, "num_beams": 2},
        ),
        ({"patience": 1e9}, {"early_stopping": "never"}),
    ],
)
def test_beams_are_those_of_transformers(mine, options):
    """Patience 1 is early_stopping = True, and patience without end "never"; False is a rule of thumb."""
    model, rng, finishes = built("llama"), np.random.default_rng(1), Counter()
    for size in (3, 9, 14):
        prompt = rng.integers(3, 50, size).tolist()
        free = theirs(prompt, [100], num_beams=4)
        eos = [*EOS, free[6]]
        (row,) = rows_of([prompt], limit=14, eos=eos)
        with model.session() as session:
            list(BeamPatience(**mine).tokens(session, [row], DecodeContext()))
        assert row.tokens == theirs(prompt, eos, **{"num_beams": 4, **options})
        finishes[row.finish] += 1
    assert finishes["eos"], "none ended: nothing is compared but the length"


CASES = {
    "h2o": {
        "kv.score": table("h2o"),
        "kv.budget": table("uniform", tokens_kept=8),
        "kv.when": {"use": "every", "tokens": 5},
    },
    "paged-prefix": {"kv.reuse": {"use": "paged-prefix", "block": 4, "blocks": 64}},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_each_prompt_finds_what_it_finds_alone_whatever_the_cache(name):
    model = built("llama", tables=CASES[name])
    prompts = [np.random.default_rng(n).integers(3, 50, n).tolist() for n in (26, 14, 9)]
    for loop, sampler in (
        (BeamPatience(beams=3), Standard()),
        (FirstFinish(3), Standard(temperature=0.9)),
    ):
        together = rows_of(prompts, sampler, limit=16, eos=EOS)
        with model.session(3) as session:
            list(loop.tokens(session, together, DecodeContext()))
            assert session.batch == 3
            for row, held in zip(together, session.lengths, strict=True):
                assert held == 0 or row.prompt.size <= held < row.seen.size
        for row, prompt in zip(together, prompts, strict=True):
            (alone,) = rows_of([prompt], sampler, limit=16, eos=EOS)
            with model.session() as session:
                list(loop.tokens(session, [alone], DecodeContext()))
            assert alone.tokens == row.tokens


@pytest.mark.parametrize("name", ["beam-patience", "first-finish"])
def test_a_search_goes_with_every_recipe_that_has_no_loop_of_its_own(name):
    for other in bundled():
        recipe = Recipe.load(other)
        if (
            not recipe.tables.keys() & {"draft", "canvas"}
            and recipe.tables.get("loop", {}).get("use", "autoregressive") != name
        ):
            tables = {**recipe.tables, "loop": {"use": name}}
            assert assemble(Recipe(tables=tables)).grade == "approximate"
