"""What every method of the axis `prompt` holds: a prompt's tokens in their order, and ids that a model reads."""

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.ir.invariants import Invariant

AXIS = find_axes()["prompt"]
SIZE, EXTRA = 50, 8  # tokens of the vocabulary, and ids behind it at most
PROMPTS = [np.random.default_rng(n).integers(0, SIZE, n) for n in (1, 2, 17)]


def law(method):
    for prompt in PROMPTS:
        before, found = prompt.copy(), method.read(prompt, SIZE)
        assert np.array_equal(prompt, before), "it wrote into the prompt"
        assert np.array_equal(found, method.read(prompt, SIZE)), "not the same for the same prompt"
        assert found.dtype == prompt.dtype and found.min() >= 0 and found.max() < SIZE + EXTRA
        tokens = iter(found.tolist())
        assert all(any(token == one for one in tokens) for token in prompt.tolist())
        if (found >= SIZE).any():
            assert Invariant.TEXT_PROMPT in method.breaks and method.steps()
        if method.grade == "lossless":
            assert np.array_equal(found, prompt)


@pytest.mark.parametrize("name", AXIS.names())
@pytest.mark.parametrize("small", [False, True])
def test_the_prompt_is_in_it(name, small):
    law(AXIS.build(name, **(AXIS.small(name) if small else {})))


@pytest.mark.parametrize("broken", ["order", "lost", "writes", "behind", "unsaid", "lossless"])
def test_the_law_catches(broken):
    class Wrong(AXIS.method("pause")):
        breaks = frozenset() if broken == "unsaid" else frozenset({Invariant.TEXT_PROMPT})
        grade = "lossless" if broken == "lossless" else "approximate"

        def read(self, prompt, vocab_size):
            if broken == "writes":
                prompt[0] = (prompt[0] + 1) % vocab_size
            changed = {"order": prompt[::-1], "lost": prompt[:-1]}.get(broken, prompt)
            return np.append(changed, vocab_size + EXTRA * (broken == "behind"))

    with pytest.raises(AssertionError):
        law(Wrong())
