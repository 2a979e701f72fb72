"""lud: its published decoding, and its ends."""

import numpy as np
import pytest

import accel
from accel.runtime.loop.lud import Lud

from ...block_case import MASK, NEW, PROMPTS, Case, after, decoded, greedy, odds


def plainly(block, threshold, repeats=False):
    """Masks one behind the other: what each says follows from the text before it and the masks alone."""

    def plain(prompt, new):
        text, calls = [*prompt.tolist(), int(after(prompt.tolist()).argmax())], 0
        end = prompt.size + new
        while len(text) < end:
            size = min(block, end - len(text))
            rows = odds(np.stack([after(text + [MASK] * n) for n in range(size)]))
            calls += 1
            unit = [int(rows[0].argmax())] if rows[0].max() < threshold else []
            for row in rows if not unit else ():
                token = int(row.argmax())
                if row.max() < threshold or (unit and token == unit[-1] and not repeats):
                    break
                unit.append(token)
            text += unit
        return text[prompt.size :], calls

    return plain


CASES = [
    Case({"block": block, "threshold": threshold}, plainly(block, threshold))
    for block, threshold in ((4, 0.3), (6, 0.0), (3, 0.15))
]


def test_its_ends():
    """Above 1 it is plain decoding; fewer calls the lower it is."""
    for prompt in PROMPTS:
        (tokens,), calls = decoded("lud", [prompt], block=5, threshold=1.1)
        assert tokens == greedy(prompt, NEW) and calls == NEW - 1
    counts = [decoded("lud", PROMPTS[:1], block=5, threshold=t)[1] for t in (1.1, 0.4, 0.2, 0.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] >= -(-(NEW - 1) // 5)
    assert Lud(block=1).grade == Lud(threshold=1.1).grade == "lossless"
    assert Lud(block=2).grade == "approximate"


def test_a_token_that_repeats_ends_a_unit():
    """The control: the same without that rule."""
    got = [decoded("lud", [prompt], block=6, threshold=0.0)[0][0] for prompt in PROMPTS]
    assert got == [plainly(6, 0.0)(prompt, NEW)[0] for prompt in PROMPTS]
    assert got != [plainly(6, 0.0, repeats=True)(prompt, NEW)[0] for prompt in PROMPTS]


def test_a_threshold_that_is_none_is_refused():
    with pytest.raises(accel.RecipeError, match="threshold"):
        decoded("lud", PROMPTS, threshold=float("nan"))
