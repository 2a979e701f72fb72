"""dkv-cache: what is read was computed as a token, one call after it was filled; no cache where each call refreshes."""

import dataclasses

import numpy as np
import pytest

import accel
from accel.ir.axis import Axis
from accel.runtime.canvas.dkv_cache import DkvCache
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.dllm_threshold import DllmThreshold

from ...diffusion_case import BLOCK, Fed, decoded, eager, prompts
from ..canvas_case import followed


def published(refresh, after=False):
    """`prv`: whose keys and values may be read; a call computes the others. What it was given as tokens may then."""

    def rule():
        prv = None

        def feeds(before):
            nonlocal prv
            real = ~before.open
            if before.shift:
                following = np.append(real[1:], real[-1])
                real = following if after else real & following
            whole = before.step < 2 or before.step % refresh == 0
            fed = np.ones(real.size, np.bool_) if whole else ~prv
            prv = real
            return fed

        return feeds

    return rule


CASES = [
    Fed({}, published(8)),
    Fed({"refresh": 3}, published(3)),
    Fed({"refresh": 5, "shifted": "after"}, published(5, after=True)),
]


@pytest.mark.parametrize("use", ["dkv-cache", "dkv-greedy"])
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_a_refresh_in_every_call_is_no_cache(shift, use):
    """Bit for bit: the logits of every call, of rows in a batch."""
    canvas = Axis("canvas", "accel.runtime.canvas").build(use, refresh=1)
    loop = DllmThreshold(block=BLOCK, threshold=0.5)
    given = prompts(0, (5, 11, 7))
    whole, refreshed = (followed(loop, one, shift, given) for one in (None, canvas))
    assert len(whole.logits) == len(refreshed.logits) > 3
    for want, got in zip(whole.logits, refreshed.logits, strict=True):
        assert np.array_equal(want, got)
    other = followed(loop, dataclasses.replace(canvas, refresh=8), shift, given)
    assert not all(
        a.shape == b.shape and np.array_equal(a, b)
        for a, b in zip(whole.logits, other.logits, strict=False)
    ), "the control: it does read"


def law_delay(canvas, shift=False):
    """A token that is filled after call i is computed in call i + 1, as a token, and read from call i + 2 on, unless
    all are computed anew; what a call reads was last computed as the token that it is.
    """
    seen = followed(DllmLowconf(block=16, steps=8), canvas, shift, prompts(1, (5,)))
    delayed = 0
    computed = {}  # slot -> the token that it last was computed as
    for i, fed in enumerate(seen.fed):
        held = seen.ids[i]
        filled = seen.filled[i - 1] if i else []
        assert set(filled) <= fed.keys()
        before = seen.filled[i - 2] if i > 1 else []
        whole = len(fed) == held.size
        if not whole:
            delayed += len(before)
            assert not set(before) & fed.keys()
        for slot in range(held.size):
            if slot not in fed:
                assert computed[slot] == held[slot], "what is read is of what it was before"
        computed |= fed
    assert delayed > 0


def test_a_token_is_computed_once_more_and_then_read():
    law_delay(DkvCache(refresh=100))


@dataclasses.dataclass(frozen=True)
class Undelayed(DkvCache):
    """What was computed as a mask is read as the token."""

    def feeds(self, sheet):
        return sheet.every if sheet.step < 2 else sheet.open


def test_without_the_delay_it_is_seen():
    with pytest.raises(AssertionError):
        law_delay(Undelayed())


@pytest.mark.parametrize("shifted", ["both", "after"])
def test_where_logits_are_of_the_slot_after_what_says_a_mask_is_computed(shifted):
    """And with `both` no slot is read that was last computed as a mask."""
    canvas = DkvCache(refresh=100, shifted=shifted)
    seen = followed(DllmLowconf(block=16, steps=8), canvas, True, prompts(1, (5,)))
    computed, stale = {}, 0
    for fed, held, masks in zip(seen.fed, seen.ids, seen.masks, strict=True):
        assert {slot - 1 for slot in masks} <= fed.keys()
        stale += sum(computed[s] != held[s] for s in range(held.size) if s not in fed)
        computed |= fed
    assert (stale > 0) == (shifted == "after")


def test_fewer_slots_are_computed():
    _, compiled = eager(False)
    fed = [
        sum(map(len, followed(DllmLowconf(block=16, steps=8), c, False, prompts()).fed))
        for c in (None, DkvCache())
    ]
    assert fed[1] < 0.8 * fed[0]
    tokens = decoded(compiled, "dllm-threshold", prompts(), canvas="dkv-cache", block=16)
    assert tokens[0] == tokens[2] and len(tokens[0][0]) == 21


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refresh": 0}, "canvas.dkv-cache: refresh is 0; give at least 1"),
        ({"shifted": "right"}, "canvas.dkv-cache: shifted 'right' does not exist"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    with pytest.raises(accel.RecipeError) as error:
        Axis("canvas", "accel.runtime.canvas").build("dkv-cache", **options)
    assert words in str(error.value)
