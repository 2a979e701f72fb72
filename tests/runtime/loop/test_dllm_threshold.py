"""dllm-threshold: the ends of its threshold, and its factor."""

import numpy as np

from accel.runtime.loop.dllm_threshold import DllmThreshold

from ...diffusion_case import BLOCK, Case, above, decoded, eager, guess_of, prompts


def by_factor(factor):
    """Fast-dLLM's factor: n + 1 slots are too many as soon as (n + 1)(1 - confidence) is not below it."""

    def stays(seen):
        order = np.argsort(-seen.sure, kind="stable")
        count = int(seen.free.sum())
        for n in range(1, count + 1):
            if (n + 1) * (1 - seen.sure[order[n - 1]]) >= factor:
                return order[: max(1, n - 1)]
        return order[:count]

    return stays


CASES = [Case({"threshold": 0.5}, above(0.5)), Case({"factor": 1.5}, by_factor(1.5))]


def test_above_all_probabilities_it_is_one_token_per_call():
    _, compiled = eager(False)
    static = decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    assert decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=1.01) == static
    assert decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=0.5) != static


def grows(some_fewer):
    """Whether each of some sets holds the one before it, and the first one slot or more."""
    return len(some_fewer[0]) >= 1 and all(
        a <= b for a, b in zip(some_fewer, some_fewer[1:], strict=False)
    )


def test_factor_takes_more_as_it_grows():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sure = rng.random(9) ** 0.1
        guess = guess_of(sure)
        factors = (0.2, 0.5, 1.0, 2.0)
        taken = [set(DllmThreshold(factor=f).stays(guess, None).tolist()) for f in factors]
        assert grows(taken) and (len(taken[0]) == len(taken[-1]) or not grows(taken[::-1]))
        for f, some in zip(factors, taken, strict=True):
            assert len(some) == 1 or all(sure[i] > 1 - f / (len(some) + 1) for i in some)
        over = [
            set(DllmThreshold(threshold=t).stays(guess, None).tolist()) for t in (0.99, 0.9, 0.5)
        ]
        assert grows(over)
