"""nbdiff: its published decoding, and its ends."""

import numpy as np
import pytest

import accel

from ...block_case import MASK, NEW, PROMPTS, Case, after, behind, decoded, odds


def plainly(block, threshold):
    def plain(prompt, new):
        text, calls = [*prompt.tolist(), int(after(prompt.tolist()).argmax())], 0
        end = prompt.size + new
        while len(text) < end:
            ids = [MASK] * min(block - 1, end - len(text))
            while MASK in ids:
                rows = odds(behind(text[:-1], [text[-1], *ids])[:-1])
                calls += 1
                sure = np.where([one == MASK for one in ids], rows.max(1), -1)
                for slot in {int(sure.argmax()), *np.flatnonzero(sure > threshold).tolist()}:
                    ids[slot] = int(rows[slot].argmax())
            text += ids
            if len(text) < end:
                calls += 1
                text.append(int(after(text).argmax()))
        return text[prompt.size :], calls

    return plain


CASES = [
    Case({"block": block, "threshold": threshold}, plainly(block, threshold))
    for block, threshold in ((4, 0.3), (6, 1.1), (8, 0.0))
]


def test_its_ends():
    """A call for each mask and one for each block; or two for a block."""
    _, calls = decoded("nbdiff", PROMPTS[:1], block=5, threshold=1.1)
    assert calls == 16 // 5 * 5 + 16 % 5
    _, calls = decoded("nbdiff", PROMPTS[:1], block=5, threshold=0.0)
    assert NEW == 17 and calls == 2 * 3 + 1


@pytest.mark.parametrize("options", [{"block": -1}, {"threshold": float("nan")}, {"mask": -2}])
def test_options_that_are_none_are_refused(options):
    with pytest.raises(accel.RecipeError, match=next(iter(options))):
        decoded("nbdiff", PROMPTS, **options)
