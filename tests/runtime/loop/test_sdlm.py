"""sdlm: its published decoding, that which checks itself, and its ends."""

import numpy as np
import pytest

import accel

from ...block_case import MASK, NEW, PROMPTS, Case, after, behind, decoded, odds


def window(text, block, end):
    size = min(block, end - len(text))
    return odds(behind(text[:-1], [text[-1], *[MASK] * (size - 1)]))


def plainly(block, threshold):
    def plain(prompt, new):
        text, calls = [*prompt.tolist(), int(after(prompt.tolist()).argmax())], 0
        end = prompt.size + new
        while len(text) < end:
            rows = window(text, block, end)
            calls += 1
            sure = rows.max(1) >= threshold
            count = max(1, len(rows) if sure.all() else int(sure.argmin()))
            text += rows.argmax(1)[:count].tolist()
        return text[prompt.size :], calls

    return plain


def checked(block):
    """The tokens of one per call; calls by what each window drafts."""

    def plain(prompt, new):
        tokens, _ = plainly(block, 2.0)(prompt, new)
        text, end, calls, drafts = [*prompt.tolist(), tokens[0]], prompt.size + new, 0, []
        while len(text) < end:
            calls += 1
            for n in range(len(drafts) + 1):
                rows = window(text, block, end)
                text.append(int(rows[0].argmax()))
                if len(text) == end or n == len(drafts) or text[-1] != drafts[n]:
                    break
            drafts = rows.argmax(1)[1:][: end - len(text) - 1].tolist()
        assert text[prompt.size :] == tokens
        return tokens, calls

    return plain


CASES = [
    *(
        Case({"block": block, "threshold": threshold}, plainly(block, threshold))
        for block, threshold in ((4, 0.3), (6, 0.0))
    ),
    Case({"block": 4, "checks": True}, checked(4)),
]


def test_its_ends():
    """One token per call; or a window."""
    _, calls = decoded("sdlm", PROMPTS[:1], block=4, threshold=1.1)
    assert calls == NEW - 1
    _, calls = decoded("sdlm", PROMPTS[:1], block=4, threshold=0.0)
    assert calls == (NEW - 1) // 4


def test_a_context_that_ends_leaves_room_for_windows():
    """Checked windows that would not fit are left out."""
    prompt = np.random.default_rng(0).integers(4, 50, 88)
    (tokens,), _ = decoded("sdlm", [prompt], NEW, block=6, checks=True)
    assert len(tokens) == 8 and tokens == plainly(6, 2.0)(prompt, 8)[0]


def test_a_threshold_that_is_none_is_refused():
    with pytest.raises(accel.RecipeError, match="threshold"):
        decoded("sdlm", PROMPTS, threshold=float("nan"))
