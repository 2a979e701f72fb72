"""freedave: the tokens of static decoding, and that a wrong rule is seen."""

import dataclasses

import pytest

import accel
from accel.runtime.canvas.dllm_blockcache import DllmBlockcache
from accel.runtime.canvas.whole import Whole
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.freedave import Freedave
from accel.runtime.sample.standard import Standard

from ...diffusion_case import (
    BLOCK,
    Case,
    decoded,
    driven,
    eager,
    prompts,
    surest,
    with_loop,
)

CASES = [Case({"drafts": 3}, surest(1), fewer=True)]


def test_one_draft_is_static_decoding():
    _, compiled = eager(False)
    static = decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    assert decoded(compiled, "freedave", prompts(), block=BLOCK, drafts=1) == static


@dataclasses.dataclass(frozen=True)
class Trusting(Freedave):
    """Takes every draft."""

    def _standing(self, draft, order, found):
        return max(1, len(found))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "canvas",
    [Whole(), DllmBlockcache(cache="prefix"), DllmBlockcache()],
    ids=["whole", "prefix", "dual"],
)
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_it_gives_the_tokens_of_static_decoding(shift, canvas):
    _, compiled = eager(shift)
    fewer = wrong = 0
    for seed in range(3):
        (prompt,) = prompts(seed, (7,))
        want, most = driven(DllmLowconf(block=BLOCK), compiled, prompt, canvas=canvas)
        got, calls = driven(Freedave(block=BLOCK), compiled, prompt, canvas=canvas)
        assert got == want and calls <= most
        fewer += most - calls
        wrong += driven(Trusting(block=BLOCK), compiled, prompt, canvas=canvas)[0] != want
    assert fewer > 0 and wrong > 0


def test_with_a_repetition_penalty_is_static_too():
    _, compiled = eager(True)
    sampler = Standard(repetition_penalty=1.7)
    for seed in range(2):
        (prompt,) = prompts(seed, (7,))
        want, _ = driven(DllmLowconf(block=BLOCK), compiled, prompt, sampler)
        assert driven(Freedave(block=BLOCK), compiled, prompt, sampler)[0] == want


def test_it_refuses_to_sample():
    with with_loop(eager(False)[1], "freedave") as made:
        with pytest.raises(
            accel.InputError, match="give temperature 0, or build with loop = dllm-lowconf"
        ):
            made.generate([1, 2, 3], temperature=0.7)
        assert len(made.generate([1, 2, 3], max_new_tokens=4, eos=[]).tokens[0]) == 4
