"""sbd: its published decoding, and its ends."""

import numpy as np
import pytest

import accel

from ...block_case import MASK, NEW, PROMPTS, Case, after, behind, decoded, odds


def plainly(block, gamma):
    def plain(prompt, new):
        text, calls = [*prompt.tolist(), int(after(prompt.tolist()).argmax())], 0
        end = prompt.size + new
        while len(text) < end:
            ids = [MASK] * min(block, end - len(text))
            while MASK in ids:
                rows = odds(np.concatenate([after(text)[None], behind(text, ids)[:-1]]))
                calls += 1
                entropy = -(rows * np.log(np.maximum(rows, 1e-300))).sum(1)
                order = [i for i in np.argsort(entropy, kind="stable") if ids[i] == MASK]
                for n, slot in enumerate(order):
                    if (
                        n and entropy[order[:n]].sum() > gamma
                    ):  # all but the largest, which is the last
                        break
                    ids[slot] = int(rows[slot].argmax())
            text += ids
        return text[prompt.size :], calls

    return plain


CASES = [
    Case({"block": block, "gamma": gamma}, plainly(block, gamma))
    for block, gamma in ((4, 1.5), (6, 0.0), (8, 4.0))
]


def test_its_ends():
    """One token per call; or a block."""
    _, calls = decoded("sbd", PROMPTS[:1], block=5, gamma=0.0)
    assert calls == NEW - 1
    _, calls = decoded("sbd", PROMPTS[:1], block=5, gamma=1e9)
    assert calls == -(-(NEW - 1) // 5)


@pytest.mark.parametrize("gamma", [-0.1, float("nan")])
def test_a_bound_that_is_none_is_refused(gamma):
    with pytest.raises(accel.RecipeError, match="gamma"):
        decoded("sbd", PROMPTS, gamma=gamma)
