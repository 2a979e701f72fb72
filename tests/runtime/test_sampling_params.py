"""SamplingParams: the same tokens as the keywords that it stands for, and refusals that name the option."""

from functools import partial

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.decode.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.3, "seed": 5, "top_k": 9},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 2},
    ],
)
def test_it_gives_what_the_keywords_give(model, options):
    want = model.generate([[4, 5], [6]], 9, **options).tokens
    params = SamplingParams(max_tokens=9, **options)
    assert model.generate([[4, 5], [6]], sampling_params=params).tokens == want
    assert list(model.stream([4, 5], sampling_params=params)) == want[0]


def test_penalties_count_the_new_tokens(model):
    """Of each prompt, behind it; a bias that does the same gives the same tokens."""

    def raised(ids, logits, start):
        new = ids[start:]
        logits[np.unique(new)] += 1.5
        np.add.at(logits, new, 2)
        return logits

    prompts, warm = [[4, 5, 4, 5, 4], [6]], {"eos": [], "temperature": 3.0, "seed": 1}
    said = {"presence_penalty": -1.5, "frequency_penalty": -2}
    found = model.generate(prompts, 40, **said, **warm).tokens
    for prompt, tokens in zip(prompts, found, strict=True):
        by_hand = partial(raised, start=len(prompt))
        assert model.generate(prompt, 40, logits_processors=[by_hand], **warm).tokens == [tokens]
        assert model.generate(prompt, 40, **warm).tokens != [tokens], "nothing is repeated"
    wrong = partial(raised, start=0)
    assert model.generate(prompts[0], 40, logits_processors=[wrong], **warm).tokens[0] != found[0]


def test_end_tokens(model):
    plain = model.generate([4, 5], 12, eos=[]).tokens[0]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert model.generate([4, 5], sampling_params=params).tokens[0] == plain
    end = plain[3]
    short = model.generate(
        [4, 5], sampling_params=SamplingParams(max_tokens=12, stop_token_ids=[end], ignore_eos=True)
    )
    assert short.tokens[0] == plain[: plain.index(end) + 1]
    both = SamplingParams(stop_token_ids=[end])
    assert both.ends(model.facts) == (*model.facts.eos, end)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -3}, "seed"),
    ],
)
def test_refusals_name_the_option(options, named):
    with pytest.raises(InputError, match=named):
        SamplingParams(**options)


def test_both_ways_at_once_are_refused(model):
    with pytest.raises(InputError, match="temperature"):
        model.generate([4], sampling_params=SamplingParams(), temperature=0.5)
    with pytest.raises(InputError, match="max_new_tokens"):
        model.generate([4], 3, sampling_params=SamplingParams())
    with pytest.raises(InputError, match="SamplingParams"):
        model.generate([4], sampling_params={"temperature": 1})
    with pytest.raises(InputError, match="stop_token_ids"):
        model.generate([4], sampling_params=SamplingParams(stop_token_ids=[10**6]))
