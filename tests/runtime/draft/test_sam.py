"""SAM decoding: the automaton and its match against comparing strings, and what is drafted."""

import time

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.draft._automaton import ROOT, Automaton
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.draft.sam import Sam
from accel.runtime.speculation.texts import TextStore


def longest(text):
    """The longest suffix of a text that occurs before its end, and the index of its first occurrence's last token."""
    for size in range(len(text) - 1, 0, -1):
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                return size, end - 1
    return 0, -1


def law(automaton, draft=lambda of, text: of.draft(np.array(text), 99).tokens.tolist()):
    """Of texts that grow a token at a time: the match is the longest one, and states are few."""
    rng = np.random.default_rng(0)
    for letters in (1, 2, 3, 3, 6):
        text = rng.integers(0, letters, 36).tolist()
        row = Sam().begin(np.array(text[:1]))
        row.automaton = automaton()
        for end in range(1, 37):
            got = draft(row, text[:end])
            size, place = longest(text[:end])
            assert row.size == size
            assert got == text[:end][place + 1 :][: min(40, 1 + 4 * size) if size else 0]
            assert len(row.automaton.length) <= 2 * end
            assert (
                got == PromptLookup(end).draft(np.array(text[:end]), len(got) or 1).tokens.tolist()
            )


class Never(Automaton):
    """No state is split."""

    def append(self, token):
        new = self._state(len(self.text) + 1, len(self.text), {})
        last, self._last = self._last, new
        self.text.append(token)
        while last >= 0 and token not in self.after[last]:
            self.after[last][token] = new
            last = self.link[last]
        self.link[new] = ROOT if last < 0 else self.after[last][token]


def test_the_match_is_the_longest():
    law(Automaton)
    with pytest.raises(AssertionError):
        law(Never)


def test_tokens_that_came_meanwhile_are_taken():
    """A row that was not asked for a while drafts as one that was asked each time."""
    text = np.random.default_rng(1).integers(0, 3, 50)
    often, once = Sam().begin(text[:5]), Sam().begin(text[:5])
    for end in range(5, 51):
        want = often.draft(text[:end], 9).tokens.tolist()
    assert once.draft(text, 9).tokens.tolist() == want != []


def test_a_longer_match_of_another_request_is_taken():
    store, own = TextStore(1000), np.array([7, 8, 9, 1, 2])
    for text in ([5, *range(10, 20), 3, 4], [*range(10, 20), 6]):
        store.add(np.array(text))
    near = np.array([*own, *range(12, 20)])  # 8 tokens of the store's, and none of its own
    assert Sam().begin(own, store).draft(near, 9).tokens.tolist() == [3, 4], "the first of equals"
    assert not len(Sam(bias=8).begin(own, store).draft(near, 9))
    assert not len(Sam().begin(own).draft(near, 9))
    ended = Sam(bias=0).begin(own, store).draft(np.array([*own, 3, 4]), 9)
    assert not len(ended), "nothing follows, and no text goes on in the next"


def test_a_token_takes_constant_time():
    """Texts that make many states: twice the tokens take about twice the time."""
    taken = []
    for size in (20_000, 40_000):
        best = np.inf
        for _ in range(3):
            row, start = Sam().begin(np.zeros(1)), time.process_time()
            row._take([0, 0, 1] * (size // 3))
            best = min(best, time.process_time() - start)
        taken.append(best)
    assert taken[1] < 4 * taken[0]


def test_bad_options():
    for options, words in [
        ({"most": 0}, "most is 0"),
        ({"growth": -1}, "growth is -1"),
        ({"bias": -1}, "bias"),
    ]:
        with pytest.raises(RecipeError, match=f"draft.sam: {words}.*; give .* to "):
            Sam(**options)
